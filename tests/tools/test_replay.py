"""train.py --replay: a step is computed again, and compared bit for bit with what the run recorded."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import checkpoint, damage, ranks, records, refused, run_of, succeeded, tiny
from torchtitan_lite.config.schema import Config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.run import attempts
from torchtitan_lite.tools import replay as replays
from torchtitan_lite.tools.replay import numbers_of, read

extended = pytest.mark.extended
# with 16 bits, whether a CPU widens them is the first rank's to decide: a collective, before the run's records are read
PLAIN: dict[str, Any] = {"run__name": "run", "train__steps": 8, "checkpoint__every": 4, "eval__every": 0}
PLAIN |= {"fsdp__param_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps on two ranks, with checkpoints of step 4 and 8."""
    return run_of(2, text, tmp_path_factory.mktemp("replay"), **PLAIN).parent


def replay(
    text: Path, folder: Path, step: int, *more: str, n: int = 2, fault: str = ""
) -> subprocess.CompletedProcess[str]:
    return ranks(n, *tiny(text, folder, **PLAIN), f"--replay={step}", *more, fault=fault)


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
    said = succeeded(replay(text, trained, 8, "--log.every=3", "--train.epochs=0"))  # numbers don't depend on these
    assert f"replay  steps 5 to 8, from {checkpoint(trained / 'run', 4)}" in said
    assert "equal   bit for bit: the losses and the gradient norm of 4 steps. " in said
    assert "follows from the data and the weights at the start of the replay, not from a later hardware fault" in said
    assert contents(trained) == before


FAULTS = {
    "wrong:1:6:forward": r"6 differs: rank 1: the sum of its losses was {0[rank_losses][1]}, and is [\d.]+; equal on",
    "wrong_grad:0:6:forward": r"6 differs: the gradient norm was {0[grad_norm]}, and is [\d.]+\. ",
    "flip_after:1:6": "7 differs: .*; on all ranks, so the parameters had differed before: the update of step 6",
}


@pytest.mark.parametrize("fault", [f if f.startswith("wrong:") else pytest.param(f, marks=extended) for f in FAULTS])
def test_a_flipped_bit_is_found_with_its_step_and_rank(fault: str, trained: Path, text: Path) -> None:
    result = replay(text, trained, 8, fault=fault)
    assert result.returncode == 1
    recorded = (record for record in records(trained / "run") if record["step"] == 6 and "loss" in record)
    assert re.search(FAULTS[fault].format(*recorded), result.stderr), result.stderr
    assert "if two replays agree with each other, a fault hit the run" in result.stderr
    assert "Traceback" not in result.stderr


# --- what has to be equal ---------------------------------------------------------------------------------------


def recorded_by(folder: Path, step: int = 7, name: str = "run") -> tuple[Config, int, dict[str, Any]]:
    """A run's config as `read` needs it, the step, and what its numbers depended on in the newest attempt."""
    attempt = attempts.read(folder / name)[-1]
    tree = {"run": {"out_dir": str(folder), "name": name}, "model": {"init_from": attempt.config["model.init_from"]}}
    return Config.model_validate(tree), step, numbers_of(attempt.config, attempt.must_match, attempt.setting)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim.lr", 0.5),
        ("train.steps", 10),
        ("grad_scaler.growth_interval", 5),
        ("spike.action", "skip"),
        ("train.on_nonfinite", "skip"),
        ("data.skip_samples", [[1, 2]]),
        ("data.sources", ["b", "a"]),
        ("data", "another hash"),
        ("tokenizer", "another hash"),
        ("model.dim", 64),
        ("cpu", "Another CPU, AVX2"),
        ("threads", 2),
        ("torch", "1.0"),
    ],
)
def test_all_that_numbers_depend_on_is_compared(key: str, value: Any, trained: Path) -> None:
    config, _, here = recorded_by(trained)
    assert read(config, 7, here)
    shown = re.escape(f"{key} was {json.dumps(here[key])}, and is {json.dumps(value)} here")
    with pytest.raises(ConfigError, match=shown):
        read(config, 7, here | {key: value})


def test_a_refused_replay_prints_the_command_that_works(trained: Path, text: Path) -> None:
    said = refused(replay(text, trained, 7, "--optim.lr=0.5", n=1), "replay it with the command of that attempt:")
    launcher, *words = shlex.split(said.splitlines()[-1])
    assert (Path(launcher).name, words[:3]) == ("torchrun", ["--nproc-per-node", "2", "train.py"])
    assert "equal   bit for bit" in succeeded(ranks(2, *words[3:]))


def test_only_a_start_depends_on_the_initial_weights(trained: Path) -> None:
    config, _, here = recorded_by(trained)
    other = here | {"model.init_from": "there"}
    assert read(config, 7, other)
    with pytest.raises(ConfigError, match='model.init_from was "", and is "there" here'):
        read(config, 3, other)


FAULT = "Replay it once more: if two replays agree with each other, a fault hit the run; if they differ, this machine "
FAULT += "computes incorrectly"
STOP = "step 10: the loss is not finite on rank 1"


def test_what_a_difference_would_mean_and_what_is_compared(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another code, or numbers that differ from time to time; and each kind of record that a run ends with."""
    shutil.copytree(trained / "run", tmp_path / "run")
    file, metrics = tmp_path / "run/attempts.jsonl", tmp_path / "run/metrics.jsonl"
    (begun, ended), lines = map(json.loads, file.read_text().splitlines()), metrics.read_text().splitlines()
    here = begun["git"] = {"commit": "new", "dirty": False}

    def of(n: int, stop: str = "", **changed: Any) -> replays.Recorded:
        changed = {key: {**begun[key], **value} for key, value in changed.items()}
        file.write_text(f"{json.dumps(begun | changed)}\n{json.dumps(ended | {'reason': stop})}\n")
        return read(*recorded_by(tmp_path, n))

    may = "This may be the cause: "
    weights = f"{may}the weights in there may have changed, the run recorded no hash of them"
    for n, dirty, changed, advice in (
        (7, False, {}, FAULT),
        (
            7,
            False,
            {"setting": {"deterministic": False}},
            f"{may}without run.deterministic a GPU may add in a different order each time",
        ),
        (7, False, {"git": {"commit": "old"}}, f"{may}the code differs from the run's (commit old -> new)"),
        (3, False, {"config": {"model.init_from": "there"}}, weights),
        (7, False, {"config": {"model.init_from": "there"}}, FAULT),
        (7, True, {"git": {"dirty": True}}, f"{may}the code has uncommitted changes"),
    ):
        monkeypatch.setattr("torchtitan_lite.run.run_folder.git_state", lambda _, dirty=dirty: here | {"dirty": dirty})
        assert of(n, **changed).advice == advice + (advice != FAULT) * f". If not: {FAULT}"
    # a spike, and a step that is not finite, at which a run ended
    spike = {"step": 9, "attempt": 1, "spike": {"loss": 9.5, "grad_norm": 2.0, "ratio": 3}}
    metrics.write_text("".join(f"{line}\n" for line in [*lines[:-3], json.dumps(spike)]))
    assert of(9).steps == {"9": {"loss": 9.5, "grad_norm": 2.0, "rank_losses": None}}
    found = of(10, "step 10: the loss is not finite on rank 1. Lower the rate")
    assert (found.start, found.last, found.steps) == (8, 10, {**of(9).steps, "10": {"stopped": STOP}})


# --- steps of all kinds -----------------------------------------------------------------------------------------


# what is wrong, the ranks whose loss is not finite, and the module that a replay names
NOT_FINITE = {
    "nan:1:6:forward": ("1", "none: computed again, all outputs are finite"),
    "nan:1:6:forward:99": ("1", "the model, in its loss (rank 1)"),
    "poison:1:6": ("0, 1", "layers.1.feed_forward.w2 (rank 0), layers.1.feed_forward.w2 (rank 1)"),
}


@pytest.mark.parametrize("fault", [pytest.param(f, marks=extended) if f.endswith("forward") else f for f in NOT_FINITE])
def test_a_step_that_is_not_finite_is_replayed(fault: str, text: Path, tmp_path: Path) -> None:
    (of_ranks, module), command = NOT_FINITE[fault], tiny(text, tmp_path, **PLAIN)
    result = ranks(2, *command, fault=fault)
    assert result.returncode == 1
    assert f"step 6: the loss is not finite on rank {of_ranks}" in result.stderr
    _, *words = shlex.split(result.stderr.splitlines()[-1])
    assert words == ["--nproc-per-node", "2", "train.py", *command, "--replay=6"]
    said = succeeded(ranks(2, *words[3:], fault=fault))
    assert f"replay  step 6: the first module whose output is not finite: {module}\n" in said
    assert f"equal   bit for bit, and not finite again: step 6: the loss is not finite on rank {of_ranks}" in said
    result = replay(text, tmp_path, 6)
    assert result.returncode == 1
    assert (
        f"step 6 is finite here; the run recorded: step 6: the loss is not finite on rank {of_ranks}" in result.stderr
    )


def test_steps_after_a_kill_after_a_damaged_checkpoint_and_of_a_fork(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def trains(*more: str, fault: str = "") -> subprocess.CompletedProcess[str]:
        return ranks(1, *tiny(text, tmp_path, **PLAIN), *more, fault=fault)

    def equal(*more: str, steps: str) -> None:
        said = succeeded(trains(*more))
        assert f"replay  steps {steps}" in said
        assert "equal   bit for bit" in said

    trains(fault="kill:0:7:forward")
    equal("--replay=6", steps="5 to 6")
    succeeded(trains())
    damage(checkpoint(run, 8))
    longer = "--train.steps=10"
    succeeded(trains(longer))
    assert [attempt.step for attempt in attempts.read(run)] == [0, 4, 4]
    equal(longer, "--replay=6", steps="5 to 6")

    fork = "--run.name=fork", f"--checkpoint.resume={run}", "--train.steps=13", "--data.skip_samples=[[60, 63]]"
    succeeded(trains(*fork))
    equal(*fork, "--replay=11", steps=f"11 to 11, from {checkpoint(run, 10)}")
    with pytest.raises(ConfigError, match=f"forked after step 10, from {checkpoint(run, 10)}; step 10 belongs to that"):
        read(*recorded_by(tmp_path, 10, "fork"))
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match="no complete checkpoint before step 11, nor the one that it was forked from"):
        read(*recorded_by(tmp_path, 11, "fork"))
