"""Every shipped config runs two steps, or is sharded on the meta device if it is too big, and fits its cluster."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, losses, ranks, succeeded, tiny
from tests.models.published import CHECKPOINTS
from torchtitan_lite.config import load
from torchtitan_lite.data.prepare.__main__ import main as prepare
from torchtitan_lite.run import mfu
from torchtitan_lite.run.mfu import Device
from torchtitan_lite.tools.estimate import planned_run
from torchtitan_lite.tools.estimate.planned_run import Plan, make_plan

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
BIG = [file for file in CONFIGS if load.load(file, {}).config.model.dim >= 512]
# the model and the optimizer are the config's; text and batch are ours, to be done in seconds
OURS = {"data.path", "tokenizer.vocab_size", "run.out_dir", "run.device", "run.threads"}
OURS |= {"train.steps", "eval.samples", "sample.every"}


def some_of(files: list[Path], quick: set[str]) -> list[Any]:
    """A parameter for each file; those that are not among the quick ones are extended."""
    return [
        pytest.param(file, id=file.stem, marks=[] if file.stem in quick else [pytest.mark.extended]) for file in files
    ]


@pytest.mark.parametrize("file", some_of([file for file in CONFIGS if file not in BIG], {"debug", "gpt_debug"}))
def test_small_configs_run_two_steps(file: Path, text: Path, tmp_path: Path) -> None:
    more = {"train__steps": 2, "train__micro_batch_size": 2, "train__global_batch_size": 4, "optim__warmup_steps": 1}
    keep = (*OURS, "train.micro_batch_size", "train.global_batch_size", "optim.warmup_steps", "log.every")
    if load.load(file, {}).config.data.objective == "pairs":
        (tmp_path / "pairs.jsonl").write_text('{"source": "ab", "target": "a"}\n{"source": "bc", "target": "b"}\n' * 9)
        keys = "--source-key", "source", "--target-key", "target", "--tokenizer", "bytes", "--val-fraction", "0.5"
        text = tmp_path / "prepared"
        assert prepare([str(tmp_path / "pairs.jsonl"), *keys, "--out", str(text)]) == 0
    command = [option for option in tiny(text, tmp_path, **more) if option.split("=")[0].removeprefix("--") in keep]
    assert f"the run is in {tmp_path / file.stem}" in succeeded(ranks(1, "--config", str(file), *command))
    assert set(losses(tmp_path / file.stem)) == {1, 2}


GIB = 2**30
ROOM = 0.8  # of the device's memory: the rest is for its context, NCCL, gaps, and what a simulation can't know
PUBLISHED = {"t5_wikihow", "gpt_124m", "gpt_1558m", "llama_150m", "llama_1b", "llama_8b", "llama_70b"}


def cluster(file: Path) -> tuple[int, Device | None]:
    """Ranks and device that a config names in its second line; None for a CPU."""
    purpose, line = file.read_text().splitlines()[:2]
    assert purpose.startswith("# ")
    found = re.fullmatch(r"# Cluster: (\d+) x (.+)", line)
    assert found, f"{file.name}: {line}"
    device = mfu.named(found[2])
    assert device is not None or found[2] == "CPU", f"{file.name}: {found[2]} is not in devices.toml"
    return int(found[1]), device


def planned(file: Path, **more: object) -> Plan:
    """The plan of a config on its own cluster."""
    ranks_, device = cluster(file)
    n_gpus = min(ranks_, device.per_node) if device else 0
    overrides = {key.replace("__", "."): value for key, value in more.items()}
    loaded = load.load(
        file, overrides, world_size=ranks_, n_gpus=n_gpus, local_world_size=n_gpus or ranks_, elsewhere=True
    )
    return make_plan(loaded.config, ranks_, device)


@pytest.mark.parametrize("file", some_of(CONFIGS, {"debug"}))  # a plan takes seconds
def test_every_config_fits_its_cluster_with_room(file: Path) -> None:
    found = planned(file)
    stated = re.findall(r"(\d+) GiB(?: per GPU|, )", file.read_text())
    assert [int(n) for n in stated] == [round(sum(found.device_bytes.values()) / GIB)] * len(stated), (
        "as plan prints it"
    )
    limit = found.device.memory_gib if found.device else 4.0  # a CPU config is for any laptop
    assert sum(found.device_bytes.values()) <= ROOM * limit * GIB
    assert found.layout.masked_sequences == 0, "the batch divides evenly"
    assert found.vocab_size >= found.config.tokenizer.vocab_size, "the default tokenizer fits"
    model = found.config.model
    assert (file.stem in PUBLISHED | {"gpt_124m_scratch"}) == ((model.family, model.size) in CHECKPOINTS)
    if file.stem in PUBLISHED - {"llama_150m"}:  # it turns off the qk_norm of its size
        assert (found.vocab_size, found.n_parameters) == CHECKPOINTS[model.family, model.size][:2]
    if found.device:
        step = planned_run.expected(found, found.device)
        assert step.exposed < step.matmuls, "bound by computing"
        assert found.config.fsdp.param_dtype == "bfloat16"
        # batches of pairs have many shapes, and compiled blocks would be compiled for them again
        assert found.config.compile.enabled == (found.config.data.objective != "pairs")
