"""What benchmarks/gpu.py does apart from measuring on a GPU: its items on a stand-in, its budget, its results."""

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
}
ITEMS = {item.name: item for item in [*gpu.ITEMS, *gpu.on_cards(2), *gpu.on_cards(8)]}
ON_STAND_IN = [name for name in ITEMS if not name.startswith("8 cards")]


@pytest.mark.extended
@pytest.mark.parametrize("name", ON_STAND_IN)
def test_every_item_runs_on_a_stand_in(name: str, tmp_path: Path) -> None:
    """The same code with tiny sizes on the CPU: two cards, worlds of fake ranks, four ranks with copied collectives."""
    words = ["--stand-in", f"--only={name}", f"--out={tmp_path}", f"--budget-s={HANGS_S}"]
    succeeded(start([sys.executable, "-m", "benchmarks.gpu", *words]))
    (record,) = gpu.read(tmp_path / "gpu.jsonl")
    with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
        logs = {f"gpu.logs/{file}" for file in ("device.log", gpu.log_name(ITEMS[name]))}
        assert {*archive.getnames()} == {"gpu.jsonl", *logs}
    item, figures = ITEMS[name], record["figures"]
    if record["error"] and item.function == "torchtitan":
        assert "is not installed" in record["error"]
        return
    assert not record["error"]
    assert figures.keys() >= EXPECTED.get(item.function, set()) or (name == "out of memory" and "not run" in figures)
    if item.function == "ranks":
        assert len(figures) == 2 * len(item.options["cases"])
        assert all(value == 0 for key, value in figures.items() if "difference" in key), figures
    if item.function == "dead_rank":
        assert figures["the other ends after, s"] < 30, figures
        assert figures["reason"].startswith("a process died: rank 1 (last seen: step 1, ")
        assert figures["all-reduces in the trace of gloo"] == 1
    if item.function == "saves":
        assert [value for key, value in figures.items() if "loaded" in key] == ["the same"] * 2, figures
    if item.function == "resume":
        assert figures == {"same losses": True, "same tensors": True}
    if item.function == "gpu_tests":
        assert "passed" not in figures["outcomes"]
        assert not figures["failed"]


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
    given = Namespace(start=0, budget_s=1e12, out=tmp_path, results=tmp_path / "gpu.jsonl", stand_in=True)
    (tmp_path / "gpu.logs").mkdir()
    for n, item in enumerate(ITEMS.values(), start=1):
        gpu.run_all([item], {}, given, {})
        with tarfile.open(tmp_path / "gpu.tar.gz") as archive:
            assert len(archive.getmembers()) == n + 1
            assert sum(member.size for member in archive) <= gpu.ARCHIVE_BYTES
            log: Any = archive.extractfile(f"gpu.logs/{gpu.log_name(item)}")
            assert log.read().decode().endswith("a" + item.name), "the end"


STEPS = [item for item in ITEMS.values() if "config" in item.options]


@pytest.mark.parametrize("item", STEPS, ids=lambda item: item.name)
def test_the_settings_for_a_gpu_are_configs(item: gpu.Item) -> None:
    """Those of a stand-in are smaller."""
    world_size = int(item.launcher[2]) if item.launcher else item.options.get("world_size", 1)
    config = gpu_items.config_of(item.options["config"], item.options["values"], world_size)
    assert (config.run.device, config.fsdp.param_dtype, config.compile.enabled) == ("cuda", "bfloat16", True)
    assert config.train.global_batch_size % (world_size * config.train.micro_batch_size) == 0
