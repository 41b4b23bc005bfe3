"""What benchmarks/gpu.py does apart from measuring on a GPU: its items on a stand-in, its budget, its results."""

import sys
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_items
from tests.helpers import HANGS_S, start, succeeded

# by function of gpu_items.py: what a stand-in must find
EXPECTED = {
    "save_pause": {"pause, s", "tokens/s meanwhile"},
    "row": {"step, s", "plan_step, s", "MFU"},
    "fake_rank": {"matmuls, s", "plan_matmuls, s", "others and copies, s"},
    "copies": {"copy, GB/s"},
}


NAMES = [item.name for item in gpu.ITEMS]


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_every_item_runs_on_a_stand_in(name: str, tmp_path: Path) -> None:
    """The same code with tiny sizes on the CPU: worlds of fake ranks, four ranks with copied collectives, ..."""
    results = tmp_path / "results.jsonl"
    words = ["--stand-in", f"--only={name}", f"--results={results}", f"--budget-s={HANGS_S}"]
    succeeded(start([sys.executable, "-m", "benchmarks.gpu", *words]))
    (record,) = gpu.read(results)
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
    if item.function == "dead_rank":
        assert figures["the other ends after, s"] < 30, figures
        assert figures["reason"].startswith("a process died: rank 1 (last seen: step 1, ")
        assert figures["all-reduces in the trace of gloo"] == 1
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
