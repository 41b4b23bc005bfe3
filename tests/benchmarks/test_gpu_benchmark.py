"""What benchmarks/gpu.py does apart from measuring on a GPU: its items on a stand-in, its budget, its results."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_items
from tests.helpers import HANGS_S, start, succeeded
from torchtitan_lite.run import mfu
from torchtitan_lite.tools.estimate import planned_run

# stands for the interpreter that runs an item: -m benchmarks.gpu_items FUNCTION OPTIONS FILE
_INTERPRETER = """#!/bin/sh
case "$3" in
device) echo '{"device": "a card", "torch": "2"}' > "$5" ;;
crash) echo '{"before": 1.5}' > "$5"; echo "RuntimeError: of the driver"; kill -9 $$ ;;
hang) sleep 1000 & echo $! > "$0.sleeping"; wait ;;
*) echo "{\\"rate\\": 2.0, \\"plan_rate\\": 4.0}" > "$5" ;;
esac
"""


@pytest.fixture
def fake_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Items that need no torch. Returns the file of results."""
    interpreter = tmp_path / "interpreter"
    interpreter.write_text(_INTERPRETER)
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    items = [gpu.Item(1, 5, "crashes", "crash"), gpu.Item(1, 1, "hangs", "hang")]
    items += [gpu.Item(2, 10**6, "too long", "works"), gpu.Item(3, 5, "works", "works")]
    monkeypatch.setattr(gpu, "ITEMS", items)
    return tmp_path / "results.jsonl"


def alive(pid: int) -> bool:
    """Whether the process runs; one that nobody waits for yet does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_failing_item_ends_nothing_and_results_survive(
    fake_items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--results", str(fake_items)]
    gpu.main(arguments)
    found = {record["item"]: record for record in gpu.read(fake_items)}
    assert list(found) == ["crashes", "hangs", "works"], "the one that does not fit into the budget waits"
    assert found["crashes"]["figures"] == {"before": 1.5}, "what it found before stays"
    assert found["crashes"]["error"] == "RuntimeError: of the driver"
    assert found["hangs"]["error"] == "ended after 2 s"
    assert not alive(int((tmp_path / "interpreter.sleeping").read_text())), "its processes ended with it"
    printed = capsys.readouterr().out
    assert "| works | rate | 2 | 4 | 0.50 |" in printed
    assert "later   too long" in printed

    with fake_items.open("ab") as file:
        file.write(b'\xff\n[1]\n{"item": "too lo')  # a damaged disk; killed while it wrote
    gpu.main(arguments)
    assert "run     " not in capsys.readouterr().out, "what has a result is skipped"
    gpu.main([*arguments, "--only=works"])
    assert [record["item"] for record in gpu.read(fake_items)] == ["crashes", "hangs", "works", "works"]


def test_an_item_that_the_budget_ends_is_tried_again(fake_items: Path) -> None:
    gpu.main(["--results", str(fake_items), "--only=hangs", "--budget-s=1.5"])
    assert gpu.read(fake_items) == []


def test_each_call_fits_into_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["--list"])
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()]
    for call in "123":
        assert 0 < sum(int(seconds) for number, seconds, *_ in lines if number == call) <= gpu.CALL_S
    assert [line[0] for line in lines] == sorted(line[0] for line in lines)


def on_stand_in(name: str, results: Path) -> dict[str, Any]:
    """The record of an item."""
    words = ["--stand-in", f"--only={name}", f"--results={results}", f"--budget-s={HANGS_S}"]
    succeeded(start([sys.executable, "-m", "benchmarks.gpu", *words]))
    (record,) = gpu.read(results)
    return record


CHEAP = ["1B, one rank of 8"]
# by function of gpu_items.py: what a stand-in must find
EXPECTED = {
    "save_pause": {"pause, s", "tokens/s meanwhile"},
    "row": {"step, s", "plan_step, s", "MFU"},
    "fake_rank": {"products, s", "plan_products, s", "others and copies, s"},
    "copies": {"copy, GB/s"},
}


def is_extended(name: str) -> Any:
    return name if name in CHEAP else pytest.param(name, marks=pytest.mark.extended)


@pytest.mark.parametrize("name", [is_extended(item.name) for item in gpu.ITEMS])
def test_every_item_runs_on_a_stand_in(name: str, tmp_path: Path) -> None:
    """The same code with tiny sizes on the CPU: worlds of fake ranks, four ranks with copied collectives, ..."""
    record = on_stand_in(name, tmp_path / "results.jsonl")
    item = next(item for item in gpu.ITEMS if item.name == name)
    if record["error"] and item.function == "torchtitan":
        assert "is not installed" in record["error"]
        return
    figures = record["figures"]
    assert not record["error"]
    assert figures.keys() >= EXPECTED.get(item.function, set())
    if item.function == "ranks":
        assert len(figures) == 2 * len(item.options["cases"])
        assert all(value == 0 for key, value in figures.items() if "difference" in key), figures
    if item.function == "resume":
        assert figures == {"same losses": True, "same tensors": True}
    if item.function == "gpu_tests":
        assert "passed" not in figures["outcomes"]
        assert not figures["failed"]


STEPS = [item for item in gpu.ITEMS if "config" in item.options]


@pytest.mark.parametrize("item", STEPS, ids=lambda item: item.name)
def test_the_settings_for_a_gpu_are_configs(item: gpu.Item) -> None:
    """Those of a stand-in are smaller."""
    world_size = item.options.get("world_size", 1)
    config = gpu_items.config_of(item.options["config"], item.options["values"], world_size)
    assert (config.run.device, config.fsdp.param_dtype, config.compile.enabled) == ("cuda", "bfloat16", True)
    assert config.train.global_batch_size % (world_size * config.train.micro_batch_size) == 0


@pytest.mark.extended
@pytest.mark.parametrize("item", STEPS, ids=lambda item: item.name)
def test_the_steps_fit_into_80_gb(item: gpu.Item) -> None:
    world_size, card = item.options.get("world_size", 1), mfu.DEVICES["h100"]
    config = gpu_items.config_of(item.options["config"], item.options["values"], world_size)
    assert planned_run.make_plan(config, world_size, card).fits


@pytest.mark.extended
def test_no_gpu_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "environment", lambda _: os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(SystemExit, match="torch sees no GPU here; --stand-in"):
        gpu.main(["--results", str(tmp_path / "results.jsonl")])


def test_throughput_of_torchtitan_is_read_from_its_log() -> None:
    line = "[rank0]:\x1b[31mstep: {0}  loss: 2.7  grad_norm:  0.2  memory: {1}GiB(64.99%)  tps: {2}  mfu: 39%\x1b[39m"
    log = "\n".join(line.format(i, 76.5, f"{tps:,}") for i, tps in enumerate([100, 200, 6667, 6600, 6700]))
    assert gpu_items.read_torchtitan(log) == {"tokens/s": 6667, "peak, GiB": 76.5}
    assert gpu_items.read_torchtitan("no such lines") == {}
