"""train.py --replay: a step is computed again, and compared bit for bit with what the run recorded."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import checkpoint, ranks, records, succeeded, tiny
from torchtitan_lite.config import cli
from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.run import attempts
from torchtitan_lite.tools.incidents.replay import differs, numbers_of, read
from torchtitan_lite.tools.incidents.which import main as which

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
    assert "equal   bit for bit: the losses and the gradient norm of 4 steps, and " in said
    assert "follows from the data and from the weights that the replay began with, not from a fault of a mach" in said
    assert contents(trained) == before


@extended
def test_steps_before_the_first_checkpoint_are_made_from_the_beginning(trained: Path, text: Path) -> None:
    said = succeeded(replay(text, trained, 3))
    assert "replay  steps 1 to 3, from the run's beginning" in said
    assert "the gradient norm of 3 steps." in said


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


def test_a_checkpoint_that_is_damaged_is_not_compared(trained: Path, text: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    damage(checkpoint(tmp_path / "run", 8))
    said = succeeded(replay(text, tmp_path, 8))
    assert "the gradient norm of 4 steps. This follows" in said


def damage(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


# --- what has to be equal ---------------------------------------------------------------------------------------


def test_another_command_is_refused_with_the_name_of_each_key(trained: Path, text: Path) -> None:
    source = checkpoint(trained / "run", 8)
    for step, more, n, expected in (
        (7, "--optim.lr=0.5", 2, "optim.lr was 0.004, and is 0.5 here"),
        (7, "--train.steps=10", 2, "train.steps was 8, and is 10 here"),
        (3, f"--model.init_from={source}", 2, f'model.init_from was "", and is "{source}" here'),
        (7, "--run.name=run", 1, "world_size was 2, and is 1 here"),
    ):
        result = replay(text, trained, step, more, n=n)
        assert result.returncode == (2 if n == 1 else 1), "that of torchrun"
        assert f"--replay={step}: the steps " in result.stderr
        assert "need the command, the processes, the kind of CPU and the torch of the run" in result.stderr
        assert f"\n  {expected}" in result.stderr
        assert "differs" not in result.stderr
    said = succeeded(replay(text, trained, 7, "--log.every=3", "--train.epochs=0"))
    assert "equal   bit for bit" in said


def recorded_by(folder: Path) -> tuple[Config, dict[str, Any]]:
    """A run's config as `read` needs it, and what its numbers depended on in the newest attempt."""
    attempt = attempts.read(folder / "run")[-1]
    tree: dict[str, Any] = {"run": {"out_dir": str(folder), "name": "run"}, "train": {"steps": 8}}
    tree["optim"] = {key: attempt.config[f"optim.{key}"] for key in ("lr", "schedule", "warmup_steps")}
    tree["model"] = {"init_from": attempt.config["model.init_from"]}
    return Config.model_validate(tree), numbers_of(attempt.config, attempt.identity, attempt.setting)


def rewrite(folder: Path, config: dict[str, Any] | None = None, **values: Any) -> None:
    """Change the only attempt of a run."""
    file = folder / "run" / attempts.FILE
    attempt, *end = map(json.loads, file.read_text().splitlines())
    attempt |= {"config": attempt["config"] | (config or {}), **values}
    file.write_text("".join(json.dumps(line) + "\n" for line in (attempt, *end)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
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
    config, here = recorded_by(trained)
    assert read(config, 7, here)
    shown = re.escape(f"{key} was {json.dumps(here[key])}, and is {json.dumps(value)} here")
    with pytest.raises(ConfigError, match=shown):
        read(config, 7, here | {key: value})


def test_the_order_of_sources_is_compared() -> None:
    one, other = (flatten(Config()) | {"data.sources": dict.fromkeys(names, 1.0)} for names in ("ab", "ba"))
    assert numbers_of(one, {}, {}) != numbers_of(other, {}, {})


def test_keys_that_only_the_first_step_reads_matter_to_a_replay_from_there(trained: Path) -> None:
    config, here = recorded_by(trained)
    for key, value in (("model.init_from", "gone"), ("model.induction_head", True)):
        assert key in here
        assert read(config, 7, here | {key: value}).start == 4
        with pytest.raises(ConfigError, match=f"{key} was .*, and is {json.dumps(value)} here"):
            read(config, 3, here | {key: value})


def test_steps_that_two_attempts_made_with_other_values_are_not_replayed(trained: Path, tmp_path: Path) -> None:
    """The checkpoint of step 6, from which the second one began, is gone."""
    shutil.copytree(trained / "run", tmp_path / "run")
    config, here = recorded_by(tmp_path)
    first = json.loads((tmp_path / "run" / attempts.FILE).read_text().splitlines()[0])
    second = first | {"attempt": 2, "step": 6}
    written = records(tmp_path / "run")
    for record in written:
        record["attempt"] = 1 + (record["step"] > 6)
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in written))
    attempts.add(tmp_path / "run", second | {"config": first["config"] | {"model.init_from": "only read at step 0"}})
    assert [*read(config, 7, here).steps] == ["5", "6", "7"]
    attempts.add(tmp_path / "run", second | {"setting": first["setting"] | {"world_size": 3}})
    for n in (7, 8):
        with pytest.raises(ConfigError, match=r"the steps 5 to ., .*Of attempt 2:\n  world_size was 3, and is 2 here"):
            read(config, n, here)
    assert read(config, 6, here).last == 6
    attempts.add(tmp_path / "run", second | {"config": first["config"] | {"optim.lr": 0.5}})
    with pytest.raises(ConfigError, match=r"Of attempt 2:\n  optim.lr was 0.5, and is 0.004 here"):
        read(config, 8, here)
    attempts.add(tmp_path / "run", second | {"config": first["config"] | {"model.init_from": "only read at step 0"}})
    shutil.rmtree(checkpoint(tmp_path / "run", 4))
    assert read(config, 8, here).start == 0


def test_what_else_differs_is_named_before_the_hardware(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    config, here = recorded_by(tmp_path)
    hardware = "Replay it once more: if two replays agree with each other, a fault hit the run"
    assert hardware in read(config, 3, here).advice
    rewrite(tmp_path, {"model.init_from": "models/first"})
    config, here = recorded_by(tmp_path)
    assert "began with the weights in models/first, and has recorded no hash of them" in read(config, 3, here).advice
    assert "models/first" not in read(config, 7, here).advice
    setting = dict(attempts.read(tmp_path / "run")[0].setting)
    for key, value in (("deterministic", False), ("compile", "inductor, TORCHINDUCTOR_MAX_AUTOTUNE")):
        rewrite(tmp_path, setting=setting | {key: value})
        assert "proves nothing" in read(config, 7, here | {key: value}).advice
        rewrite(tmp_path, setting=setting)
    rewrite(tmp_path, git={"commit": "0123", "dirty": False})
    advice = read(config, 7, here).advice
    assert advice.startswith("The code is not that of the run, so this may be the cause: ")
    assert "commit 0123 -> " in advice
    assert hardware not in advice


# --- steps of all kinds -----------------------------------------------------------------------------------------


def test_steps_that_were_not_logged_are_compared_with_the_next_record(trained: Path, tmp_path: Path) -> None:
    """Of a step, of a spike, or of what stopped the run: a step that was not finite."""
    shutil.copytree(trained / "run", tmp_path / "run")
    every = records(tmp_path / "run")
    config, here = recorded_by(tmp_path)

    def keep(*steps: int, **spike: Any) -> None:
        kept = [r for r in every if "loss" not in r or r["step"] in steps]
        kept += [{"step": 7, "attempt": 1, "spike": spike}] if spike else []
        (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))

    keep(3, 6)
    recorded = read(config, 5, here)
    assert (recorded.start, recorded.last, [*recorded.steps]) == (4, 6, ["6"])
    for step in (0, 7):
        with pytest.raises(ConfigError, match=f"--replay={step}: .* has recorded the steps up to 6"):
            read(config, step, here)
    keep(3, 6, loss=9.0, grad_norm=1.0, rank_losses=[1.0, 2.0], loss_limit=5.0)
    assert read(config, 7, here).steps["7"] == {"loss": 9.0, "grad_norm": 1.0, "rank_losses": [1.0, 2.0]}
    keep(5)
    reason = "step 9: the loss is not finite on rank 0. More"
    attempts.add(tmp_path / "run", {"attempt": 1, "ended": "failed", "last_step": 8, "reason": reason})
    assert [read(config, n, here).last for n in (5, 6, 9)] == [5, 9, 9]
    assert "9" not in read(config, 5, here).steps
    assert read(config, 9, here).steps["9"] == {"stopped": "step 9: the loss is not finite on rank 0"}
    reason = "step 9: replicas of the model differ"
    attempts.add(tmp_path / "run", {"attempt": 1, "ended": "failed", "last_step": 8, "reason": reason})
    with pytest.raises(ConfigError, match="has recorded the steps up to 5"):
        read(config, 6, here)


def test_a_difference_names_what_is_known() -> None:
    then = {"loss": 2.0, "grad_norm": 1.0, "rank_losses": [1.0, None, 3.0]}
    assert not differs(then, then, 9, 8)
    one = differs(then, then | {"rank_losses": [1.0, 2.0, 3.0]}, 9, 8)
    assert one.startswith("rank 1: the sum of its losses was None")
    found = differs(then, then | {"loss": 2.5, "rank_losses": [1.5, 2.0, 2.0]}, 9, 5)
    assert found.endswith("had differed before: the update of a step from 5 to 8")
    many = then | {"rank_losses": None}  # of more ranks than are recorded
    assert differs(many, then | {"loss": 2.5}, 9, 8) == "the loss was 2.0, and is 2.5"
    assert not differs(many, then, 9, 8)


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


def test_steps_after_a_kill_after_a_damaged_checkpoint_and_of_a_fork(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def trains(*more: str, fault: str = "") -> subprocess.CompletedProcess[str]:
        return ranks(1, *tiny(text, tmp_path, **PLAIN), *more, fault=fault)

    def equal(*more: str) -> str:
        said = succeeded(trains(*more))
        assert "equal   bit for bit" in said
        return said

    def samples(name: str, step: int) -> str:
        assert which([str(tmp_path / name), "--step", str(step)]) == 0
        return capsys.readouterr().out.partition(",")[0]

    trains(fault="kill:0:7:forward")
    assert "steps 5 to 6" in equal("--replay=6")
    assert samples("run", 6) == "step 6: samples 30 to 35"
    succeeded(trains())
    assert "steps 5 to 7" in equal("--replay=7")
    damage(checkpoint(run, 8))
    longer = "--train.steps=10"
    succeeded(trains(longer))
    assert [attempt.step for attempt in attempts.read(run)] == [0, 4, 4]
    assert "steps 5 to 6" in equal(longer, "--replay=6")
    result = trains("--train.steps=8", "--replay=6")
    assert result.returncode == 2
    assert "train.steps was 10, and is 8 here" in result.stderr

    fork = "--run.name=fork", f"--checkpoint.resume={run}", "--train.steps=13", "--data.skip_samples=[[60, 63]]"
    succeeded(trains(*fork))
    assert f"steps 11 to 11, from {checkpoint(run, 10)}" in equal(*fork, "--replay=11")
    assert f"steps 13 to 13, from {checkpoint(tmp_path / 'fork', 12)}" in equal(*fork, "--replay=13")
    assert samples("fork", 11) == "note    the samples 60 to 62 were skipped before step 11\nstep 11: samples 63 to 68"
    result = trains(*fork, "--replay=10")
    assert result.returncode == 2
    assert f"fork was forked after step 10, from {checkpoint(run, 10)}; step 10 is of that run" in result.stderr
    shutil.rmtree(run)
    result = trains(fork[0], *fork[2:], "--replay=11")
    assert result.returncode == 2
    assert "fork has no complete checkpoint before step 11, nor the one that it was forked from" in result.stderr


def test_a_step_of_0_does_not_train() -> None:
    for words, trains in ((["--replay=0"], False), (["--replay=5"], False), ([], True)):
        assert cli.parse(words, world_size=1, n_gpus=0).trains == trains
