"""train.py --replay: a step is computed again, and compared bit for bit with what the run recorded."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import checkpoint, ranks, records, succeeded, tiny
from torchtitan_lite.checkpointing.compatibility import bitwise_setting
from torchtitan_lite.config import cli
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.tools.incidents.replay import Recorded, differs, has_changed, not_the_same, read

extended = pytest.mark.extended
PLAIN: dict[str, Any] = {"run__name": "run", "train__steps": 8, "checkpoint__every": 4, "eval__every": 0}


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps on two ranks, with checkpoints of step 4 and 8."""
    folder = tmp_path_factory.mktemp("replay")
    succeeded(ranks(2, *tiny(text, folder, **PLAIN)))
    return folder


def replay(
    text: Path, folder: Path, step: int, *more: str, n: int = 2, fault: str = ""
) -> subprocess.CompletedProcess[str]:
    return ranks(n, *tiny(text, folder, **PLAIN), f"--replay={step}", *more, fault=fault)


def config_of(folder: Path) -> Config:
    return Config.model_validate({"run": {"out_dir": str(folder), "name": "run"}, "train": {"steps": 8}})


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def test_equal_steps_are_the_data_and_the_model_and_the_run_is_not_changed(trained: Path, text: Path) -> None:
    before = contents(trained)
    steps = [record for record in records(trained / "run") if "loss" in record]
    assert len(steps) == 8
    for record in steps:
        assert len(set(record["rank_losses"])) == 2
        assert sum(record["rank_losses"]) / (6 * 32) == pytest.approx(record["loss"], rel=1e-6)
    said = succeeded(replay(text, trained, 8))
    assert f"replay  steps 5 to 8, from {checkpoint(trained / 'run', 4)}" in said
    assert "equal   bit for bit: loss, gradient norm and each rank's loss of 4 steps, and " in said
    assert "follows from the data and from the weights that the replay began with, not from a fault of a mach" in said
    assert contents(trained) == before


@extended
def test_steps_before_the_first_checkpoint_are_made_from_the_beginning(trained: Path, text: Path) -> None:
    said = succeeded(replay(text, trained, 3))
    assert "replay  steps 1 to 3, from the run's beginning" in said
    assert "each rank's loss of 3 steps." in said


FAULTS = {
    "wrong:1:6:forward": r"6 differs: rank 1: the sum of its losses was [\d.]+, and is [\d.]+; equal on all other",
    "wrong_grad:0:6:forward": "6 differs: the gradient norm .*; .* rank is equal, so it was a backward pass",
    "flip_after:1:6": "7 differs: .*; on all ranks, so the parameters had differed before: the update of step 6",
    "flip_after:1:8": r"after step 8 1 of \d+ tensors differ from .*step-00000008, first model\.output\.weight",
}


@pytest.mark.parametrize("fault", [f if f.startswith("wrong:") else pytest.param(f, marks=extended) for f in FAULTS])
def test_a_flipped_bit_is_found_with_its_step_and_rank(fault: str, trained: Path, text: Path) -> None:
    result = replay(text, trained, 8, fault=fault)
    assert result.returncode == 1
    assert re.search(FAULTS[fault], result.stderr), result.stderr
    assert "if two replays agree with each other, a fault hit the run" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_change_of_the_world_size_between_kept_checkpoints(trained: Path, text: Path, tmp_path: Path) -> None:
    """The checkpoint of step 8, from which one rank has continued, is gone."""
    shutil.copytree(trained / "run", tmp_path / "run")
    longer = tiny(text, tmp_path, **PLAIN | {"train__steps": 10})
    succeeded(ranks(1, *longer))
    shutil.rmtree(checkpoint(tmp_path / "run", 8))
    said = succeeded(replay(text, tmp_path, 7))
    assert "equal   bit for bit: loss, gradient norm and each rank's loss of 3 steps" in said
    result = replay(text, tmp_path, 7, n=1)
    assert result.returncode == 2
    assert "world_size was 2, and is 1 here" in result.stderr
    result = replay(text, tmp_path, 9, "--train.steps=10", n=1)
    assert result.returncode == 2, result.stdout
    assert "--replay=9: the steps 5 to 9, which follow" in result.stderr
    assert re.search(r"A resume has changed them after step 8: .*\bworld_size 2 -> 1", result.stderr)

    # as an older version recorded it: the losses of ranks name the world size, and a dtype may be the cause
    run = tmp_path / "run"
    (run / "changes.jsonl").unlink()
    config = config_of(tmp_path)
    assert read(config, 7).setting["world_size"] == 2
    with pytest.raises(ConfigError, match="changed them before step 9: world_size 2 -> 1"):
        read(config, 9)
    state = json.loads((checkpoint(run, 10) / "state.json").read_text())
    state["bitwise_setting"] |= {"world_size": 2, "param_dtype": "bfloat16"}
    (checkpoint(run, 10) / "state.json").write_text(json.dumps(state))
    assert "a resume has changed param_dtype float32 -> bfloat16" in read(config, 7).unsure


def test_the_instructions_of_the_cpu_are_part_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment variables limit them, so that the same CPU rounds in another way."""
    world = World(0, 1, torch.device("cpu"), 1)
    here = bitwise_setting(Config(), world)["instructions"]
    assert here.startswith(torch.backends.cpu.get_cpu_capability())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "SSE4_2")
    assert bitwise_setting(Config(), world)["instructions"].endswith(
        ", ONEDNN_MAX_CPU_ISA=AVX2, MKL_ENABLE_INSTRUCTIONS=SSE4_2"
    )


def test_another_machine_or_command_is_refused(trained: Path) -> None:
    config = config_of(trained)
    recorded = read(config, 7)
    here = dict(recorded.setting)
    assert {"cpu", "torch", "threads", "world_size"} <= here.keys()
    same = Recorded(recorded.start, recorded.last, "", {}, "", here)
    assert not not_the_same(same, config, here)
    said = not_the_same(replace(same, setting={**here, "cpu": "Another CPU, AVX2", "torch": "1.0"}), config, here)
    assert said.startswith("a replay needs the command, the number of processes, the kind of CPU and the torch")
    assert f"cpu was Another CPU, AVX2, and is {here['cpu']} here" in said
    assert f"torch was 1.0, and is {here['torch']} here" in said
    assert "train.global_batch_size was 6, and is 8 here" in not_the_same(recorded, config, here)
    older = {key: value for key, value in recorded.config.items() if key != "train.batch_schedule"}
    later = config.model_copy(update={"train": config.train.model_copy(update={"batch_schedule": [[0, 6]]})})
    assert "train.batch_schedule was [], and is [[0, 6]] here" in not_the_same(
        replace(recorded, config=older), later, here
    )
    other = replace(same, start=4, steps=recorded.steps)  # of a run without a checkpoint
    assert "step 5 had the learning rate" in not_the_same(other, config, here)
    resized = Recorded(4, 7, "", recorded.steps, "")
    assert "step 5 was made by 2 ranks, and here are 4" in not_the_same(resized, config, {"world_size": 4})


def test_steps_that_were_not_logged_are_compared_with_the_next_record(trained: Path, tmp_path: Path) -> None:
    """Of a step, or of what stopped the run: a step that was not finite."""
    shutil.copytree(trained / "run", tmp_path / "run")
    config, every = config_of(tmp_path), records(tmp_path / "run")
    kept = [r for r in every if "loss" not in r or r["step"] in (3, 6)]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    recorded = read(config, 5)
    assert (recorded.start, recorded.last, [*recorded.steps]) == (4, 6, [6])
    for step in (0, 7):
        with pytest.raises(ConfigError, match=f"--replay={step}: .* has recorded the steps up to 6"):
            read(config, step)
    kept = [r for r in every if "loss" not in r or r["step"] < 6]
    odd = '{"step": 5, "loss": 1.0, "rank_losses": null}\n{"step": 5, "loss": [1]}\n{"step": 7, "spike": [1]}\n'
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept) + odd)
    (tmp_path / "run/run.json").write_text('{"reason": "step 9: the loss is not finite on rank 0. More"}')
    assert [read(config, n).last for n in (5, 6, 9)] == [5, 9, 9]
    recorded = read(config, 5)
    assert recorded.steps[5]["rank_losses"]
    assert not has_changed(config, 5, recorded)
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(r | {"loss": 9.0}) + "\n" for r in kept))
    assert has_changed(config, 5, recorded), "as by a start of the run while the replay reads"


def test_a_difference_names_what_is_known() -> None:
    then = {"step": 9, "loss": 2.0, "grad_norm": 1.0, "rank_losses": [1.0, None, 3.0]}
    same = {"loss": 2.0, "grad_norm": 1.0, "rank_losses": [1.0, float("nan"), 3.0]}
    assert not differs(then, same, 8)
    assert differs(then, same | {"rank_losses": [1.0, 2.0, 3.0]}, 8).startswith(
        "rank 1: the sum of its losses was None"
    )
    found = differs(then, same | {"loss": 2.5, "rank_losses": [1.5, 2.0, 2.0]}, 5)
    assert found.endswith("had differed before: the update of a step from 5 to 8")
    older = {"step": 9, "loss": 2.0, "grad_norm": 1.0}
    assert differs(older, same | {"loss": 2.5}, 8) == "the loss was 2.0, and is 2.5"
    assert not differs(older, same, 8)


@extended
def test_a_step_that_is_not_finite_is_replayed(text: Path, tmp_path: Path) -> None:
    fault = "nan:1:6:forward"
    result = ranks(2, *tiny(text, tmp_path, **PLAIN), fault=fault)
    assert result.returncode == 1
    assert "step 6: the loss is not finite on rank 1" in result.stderr
    said = succeeded(replay(text, tmp_path, 6, fault=fault))
    assert "equal   bit for bit, and not finite again: step 6: the loss is not finite on rank 1" in said
    result = replay(text, tmp_path, 6)
    assert result.returncode == 1
    assert "step 6 is finite here; the run recorded: step 6: the loss is not finite on rank 1" in result.stderr


def test_a_step_of_0_does_not_train() -> None:
    for words, trains in ((["--replay=0"], False), (["--replay=5"], False), ([], True)):
        assert cli.parse(words, world_size=1, n_gpus=0).trains == trains
