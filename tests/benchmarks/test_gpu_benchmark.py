"""What benchmarks/gpu.py does apart from measuring on a GPU: its items on a stand-in, its budget, its results."""

import itertools
import re
import sys
import tarfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_items
from tests.helpers import HANGS_S, start, succeeded

# by function of gpu_items.py: what a stand-in must find
EXPECTED = {
    "save_pause": {"pause, s", "tokens/s meanwhile"},
    "row": {"step, s", "plan_step, s", "MFU"},
    "fake_rank": {"matmuls, s", "plan_matmuls, s", "others and copies, s", "kernels, share of the step"},
    "copies": {"copy, GB/s"},
    "ends": {"exit code"},
    "slow_rank": {"seconds by rank", "extra, share of the pauses"},
    "collectives": {"all-gather, GB/s", "gather, GB/s", "scatter, GB/s"},
    "resume": {"same losses", "same tensors"},
    "gpu_tests": {"outcomes", "failed"},
}
ITEMS = {item.name: item for item in [*gpu.ITEMS, *gpu.on_cards(2), *gpu.on_cards(8)]}


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in ITEMS if not name.startswith("8 cards")])
def test_every_item_runs_on_a_stand_in(name: str, tmp_path: Path) -> None:
    """The same code with tiny sizes on the CPU: two cards, worlds of fake ranks, four ranks with copied collectives."""
    given = ["--stand-in", f"--only={name}", f"--out={tmp_path / 'out'}", f"--budget-s={HANGS_S}"]
    succeeded(start([sys.executable, "-m", "benchmarks.gpu", *given]))
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"gpu.jsonl", "gpu.tar.gz"}
    with tarfile.open(tmp_path / "out" / "gpu.tar.gz") as archive:
        assert {*archive.getnames()} == {f"gpu/{n}" for n in ("gpu.jsonl", "device.log", gpu.log_name(ITEMS[name]))}
    (record,) = gpu.read(tmp_path / "out" / "gpu.jsonl")
    item, figures, missing = ITEMS[name], record["figures"], "torchtitan is not installed"
    assert not record["error"] or (item.function == "torchtitan" and missing in record["error"])
    assert figures.keys() >= EXPECTED.get(item.function, set()) or (name == "out of memory" and "not run" in figures)
    assert False not in [value for key, value in figures.items() if key.startswith("same ")]
    differences = [value for key, value in figures.items() if "difference" in key]
    assert differences == [0] * len(item.options.get("cases", ())), figures
    if item.function == "dead_rank":
        assert figures["the other ends after, s"] < 30, figures
        assert figures["reason"].startswith("a process died: rank 1 (last seen: step 1, ")
        assert figures["all-reduces in the trace of gloo"] == 1
    loaded = [value for key, value in figures.items() if "loaded by" in key]
    assert loaded == ["the same"] * (2 if item.function == "saves" else 0), figures
    assert ("passed" in figures.get("outcomes", ""), figures.get("failed", "")) == (False, ""), figures


@pytest.mark.extended
def test_a_case_that_fails_keeps_those_before_it(tmp_path: Path) -> None:
    cases = {"first": {"optim.name": "adamw"}, "second": {"optim.name": "nonsense"}}
    item = gpu.Item(0, "", "ranks", {"n": 2, "cases": cases})
    found, error = gpu.run_item(item, HANGS_S, tmp_path / "log", ["--stand-in"], gpu.environment(Namespace(wheels="")))
    assert error == "RuntimeError: ranks ended with [1, 1]"
    assert found["first: largest difference from the CPU"] == 0


def test_results_and_the_ends_of_logs_are_packed_after_each_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_item(item: gpu.Item, _limit_s: float, log: Path, *_: Any) -> tuple[dict[str, Any], str]:
        assert re.fullmatch(r"[A-Za-z0-9._-]+", log.name), "a name that any system takes"
        log.write_text("a" * 2000 + item.name)
        return {}, ""

    monkeypatch.setattr(gpu, "ARCHIVE_BYTES", 1000 * len(ITEMS))
    monkeypatch.setattr(gpu, "run_item", run_item)
    given = Namespace(
        start=0, budget_s=1e12, out=tmp_path, logs=tmp_path, results=tmp_path / "gpu.jsonl", stand_in=True
    )
    for n, item in enumerate(ITEMS.values(), start=1):
        gpu.run_all([item], {}, given, {})
        with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
            assert len(archive.getmembers()) == n + 1
            assert sum(member.size for member in archive) <= gpu.ARCHIVE_BYTES
            log: Any = archive.extractfile(f"gpu/{gpu.log_name(item)}")
            assert log.read().decode().endswith("a" + item.name), "the end"

    # the next call repeats what the budget ended, after what has not run
    monkeypatch.setattr(gpu, "run_item", lambda *_: ({}, "ended after 1 s"))
    monkeypatch.setattr(gpu, "time", Namespace(monotonic=itertools.count().__next__))
    given.budget_s = 1
    gpu.run_all([item], {}, given, {})
    assert gpu.missing([item, gpu.ITEMS[0]], gpu.read(given.results)[1:], {}) == [gpu.ITEMS[0], item]


def test_what_items_and_their_tests_start_has_the_packages_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed" / "only_there").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", gpu.environment(Namespace(wheels=tmp_path))["PYTHONPATH"])
    succeeded(start([sys.executable, "-c", "import only_there, benchmarks.gpu"]))


@pytest.mark.parametrize("item", [i for i in ITEMS.values() if "config" in i.options], ids=lambda item: item.name)
def test_the_settings_for_a_gpu_are_configs(item: gpu.Item) -> None:
    """Those of a stand-in are smaller."""
    world_size = int(item.launcher[2]) if item.launcher else item.options.get("world_size", 1)
    config = gpu_items.config_of(item.options["config"], item.options["values"], world_size)
    assert (config.run.device, config.fsdp.param_dtype, config.compile.enabled) == ("cuda", "bfloat16", True)
    assert config.train.global_batch_size % (world_size * config.train.micro_batch_size) == 0
