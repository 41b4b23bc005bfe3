"""train.py --replay: a step is computed again, and compared bit for bit with what the run recorded."""

import json
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import checkpoint, ranks, records, refused, succeeded, tiny
from torchtitan_lite import __version__
from torchtitan_lite.checkpointing.compatibility import AUTOTUNING
from torchtitan_lite.checkpointing.shards import read_tensors
from torchtitan_lite.config.schema import Config
from torchtitan_lite.errors import ConfigError, NonFiniteError
from torchtitan_lite.optim.finite_guard import Incident
from torchtitan_lite.optim.step_record import Numbers
from torchtitan_lite.run import attempts
from torchtitan_lite.tools import replay as replays
from torchtitan_lite.tools.replay import numbers_of, read
from torchtitan_lite.tools.which import main as which

extended = pytest.mark.extended
# with 16 bits, whether a CPU widens them is the first rank's to decide: a collective, before the run's records are read
PLAIN: dict[str, Any] = {"run__name": "run", "train__steps": 8, "checkpoint__every": 4, "eval__every": 0}
PLAIN |= {"fsdp__param_dtype": "bfloat16"}


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
    said = succeeded(replay(text, trained, 8, "--log.every=3", "--train.epochs=0"))  # numbers don't depend on these
    assert f"replay  steps 5 to 8, from {checkpoint(trained / 'run', 4)}" in said
    assert "equal   bit for bit: the losses and the gradient norm of 4 steps, and " in said
    assert "follows from the data and the weights at the start of the replay, not from a later hardware fault" in said
    assert contents(trained) == before


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


def damage(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


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


def test_the_order_of_sources_is_part_of_what_numbers_depend_on(trained: Path) -> None:
    attempt = attempts.read(trained / "run")[-1]
    config = {**attempt.config, "data.sources": {"b": 1.0, "a": 2.0}}
    assert numbers_of(config, {}, {})["data.sources"] == ["b", "a"]


def test_only_a_start_depends_on_the_initial_weights(trained: Path) -> None:
    config, _, here = recorded_by(trained)
    other = here | {"model.init_from": "there"}
    assert read(config, 7, other)
    with pytest.raises(ConfigError, match='model.init_from was "", and is "there" here'):
        read(config, 3, other)


FAULT = "Replay it once more: if two replays agree with each other, a fault hit the run; if they differ, this machine "
FAULT += "computes incorrectly"
AGAIN = "a GPU may add in a different order each time, so this proves nothing"
VERSIONS, DIRTY = f"{__version__} -> {__version__}", "If they differ from the run's, they may be the cause. "
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

    code = "The code differs from the run's, which may be the cause: torchtitan_lite"
    weights = "The run began with the weights in there, and recorded no hash of them. If they have changed since, that "
    nothing = f"{AUTOTUNING} chooses kernels by their time, which may differ each time, so this proves nothing"
    for n, dirty, changed, advice in (
        (7, False, {}, FAULT),
        (7, False, {"setting": {"deterministic": False}}, f"Without run.deterministic, {AGAIN}"),
        (
            7,
            False,
            {"setting": {"compile": f"a, {AUTOTUNING}"}},
            nothing,
        ),
        (7, False, {"git": {"commit": "old"}}, f"{code} {VERSIONS}, commit old -> new, dirty False -> False"),
        (3, False, {"config": {"model.init_from": "there"}}, f"{weights}is the cause. {FAULT}"),
        (7, False, {"config": {"model.init_from": "there"}}, FAULT),
        (7, True, {"git": {"dirty": True}}, f"The code has uncommitted changes. {DIRTY}{FAULT}"),
    ):
        monkeypatch.setattr("torchtitan_lite.run.run_folder.git_state", lambda _, dirty=dirty: here | {"dirty": dirty})
        assert of(n, **changed).advice == advice
    # a spike, and a step that is not finite, at which a run ended
    spike = {"step": 9, "attempt": 1, "spike": {"loss": 9.5, "grad_norm": 2.0, "ratio": 3}}
    metrics.write_text("".join(f"{line}\n" for line in [*lines[:-3], json.dumps(spike)]))
    assert of(9).steps == {"9": {"loss": 9.5, "grad_norm": 2.0, "rank_losses": None}}
    found = of(10, "step 10: the loss is not finite on rank 1. Lower the rate")
    assert (found.start, found.last, found.steps) == (8, 10, {**of(9).steps, "10": {"stopped": STOP}})


class StopError(NonFiniteError):
    """What a guard raises."""


def test_each_step_and_each_tensor_is_compared(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `compute`, on a stand-in of a run of steps 3 and 4, with the checkpoint of step 4."""
    monkeypatch.setattr(replays, "first_not_finite", lambda *_: "")
    saved = dict(read_tensors(checkpoint(finished, 4)))
    name = "model.output.weight"
    flipped = saved[name].clone()
    flipped.view(-1)[-1] = -flipped.view(-1)[-1]
    finite, nan = (
        Numbers(2.5, 1.5, 1.0, 0.0, [8.0, 9.0], {}),
        Numbers(math.nan, math.inf, 1.0, 0.0, [math.nan, 9.0], {}),
    )
    of_finite = {"loss": 2.5, "grad_norm": 1.5, "rank_losses": [8.0, 9.0]}
    of_nan = {"loss": None, "grad_norm": None, "rank_losses": [None, 9.0]}
    stop = "step 4: the loss is not finite on rank 1"

    def result(
        numbers: Numbers, tensors: Any, then: Any, stops: str = "", folder: Path = finished, logged: bool = True
    ) -> str:
        incident = Incident({}, "", StopError(f"{stops}. More")) if stops else None
        guard = SimpleNamespace(check=lambda record: incident if record.step == 4 else None)
        s: Any = SimpleNamespace(
            watchdog=SimpleNamespace(step=lambda n: None),
            checkpointer=SimpleNamespace(tensors=lambda: tensors),
            preemption=SimpleNamespace(agreed=False),
            log=SimpleNamespace(record=lambda _: None, info=lambda _: None),
            process=SimpleNamespace(rank=0, untimed=None),
            guards=[guard],
            pending=None,
            state=None,
        )

        def step(_: Any, number: int) -> Any:
            s.pending = SimpleNamespace(step=number, numbers=numbers)
            return SimpleNamespace(numbers=numbers)

        before = {"3": of_nan if numbers is nan else of_finite} if logged else {}
        recorded = replays.Recorded(2, 4, "", before | {"4": then}, [], "ADVICE")
        try:
            return replays.compute(s, step, recorded, folder)
        except replays.DifferentError as error:
            return f"different: {error}"

    end = ". This follows from the data and the weights at the start of the replay, not from a later hardware fault"
    same, n = "bit for bit: the losses and the gradient norm of 2 steps", f"{len(saved)} tensors"
    apart = f"different: after step 4 1 of {n} differ from {checkpoint(finished, 4)}, first {name}: the update differed"
    norm = "different: step 4 differs: the gradient norm was 1.25, and is 1.5; the loss of each rank is equal, so it"
    others = of_finite | {"loss": 2.25, "rank_losses": [7.0, 7.0]}
    all_ranks = "different: step 4 differs: the loss was 2.25, and is 2.5; on all ranks, so the parameters had differed"
    all_ranks += " before: the update of"
    again, damaged = f"bit for bit, and not finite again: {stop}", tmp_path / "run"
    shutil.copytree(finished, damaged)
    damage(checkpoint(damaged, 4))
    for expected, *given in (
        (f"{same}, and {n} of a checkpoint{end}", finite, saved, of_finite),
        (f"{same}, and {n} of a checkpoint{end}", nan, saved, of_nan),
        (f"{same}{end}", finite, saved, of_finite, "", finished / "none"),
        (f"{same}{end}", finite, saved, of_finite, "", damaged),
        (f"{apart}, or memory changed before it was saved. ADVICE", finite, saved | {name: flipped}, of_finite),
        (f"{norm} was a backward pass or a sum over ranks. ADVICE", finite, saved, of_finite | {"grad_norm": 1.25}),
        (f"{all_ranks} step 3. ADVICE", finite, saved, others),
        (f"{all_ranks} a step from 2 to 3. ADVICE", finite, saved, others, "", finished, False),
        (f"{again}{end}", finite, saved, {"stopped": stop}, stop),
        (f"different: step 4 is finite here; the run recorded: {stop}. ADVICE", finite, saved, {"stopped": stop}),
        (f"different: {stop} here; the run recorded: step 4 is finite. ADVICE", finite, saved, of_finite, stop),
    ):
        assert result(*given) == expected


# --- steps of all kinds -----------------------------------------------------------------------------------------


# what is wrong, the ranks whose loss is not finite, and the module that a replay names
NOT_FINITE = {
    "nan:1:6:forward": ("1", "none: computed again, all outputs are finite"),
    "poison:1:6": ("0, 1", "layers.1.feed_forward.w2 (rank 0), layers.1.feed_forward.w2 (rank 1)"),
}


@pytest.mark.parametrize("fault", [f if "poison" in f else pytest.param(f, marks=extended) for f in NOT_FINITE])
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


def test_steps_after_a_kill_after_a_damaged_checkpoint_and_of_a_fork(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def trains(*more: str, fault: str = "") -> subprocess.CompletedProcess[str]:
        return ranks(1, *tiny(text, tmp_path, **PLAIN), *more, fault=fault)

    def equal(*more: str, steps: str) -> None:
        said = succeeded(trains(*more))
        assert f"replay  steps {steps}" in said
        assert "equal   bit for bit" in said

    def samples(name: str, step: int) -> str:
        assert which([str(tmp_path / name), "--step", str(step)]) == 0
        return capsys.readouterr().out.partition(",")[0]

    trains(fault="kill:0:7:forward")
    equal("--replay=6", steps="5 to 6")
    assert samples("run", 6) == "step 6: samples 30 to 35"
    succeeded(trains())
    found = read(*recorded_by(tmp_path))
    assert (found.start, found.last) == (4, 7), "made by two attempts"
    damage(checkpoint(run, 8))
    longer = "--train.steps=10"
    succeeded(trains(longer))
    assert [attempt.step for attempt in attempts.read(run)] == [0, 4, 4]
    equal(longer, "--replay=6", steps="5 to 6")

    fork = "--run.name=fork", f"--checkpoint.resume={run}", "--train.steps=13", "--data.skip_samples=[[60, 63]]"
    succeeded(trains(*fork))
    equal(*fork, "--replay=11", steps=f"11 to 11, from {checkpoint(run, 10)}")
    assert read(*recorded_by(tmp_path, 13, "fork")).checkpoint == str(checkpoint(tmp_path / "fork", 12))
    assert samples("fork", 11) == "note    the samples 60 to 62 were skipped before step 11\nstep 11: samples 63 to 68"
    with pytest.raises(ConfigError, match=f"forked after step 10, from {checkpoint(run, 10)}; step 10 belongs to that"):
        read(*recorded_by(tmp_path, 10, "fork"))
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match="no complete checkpoint before step 11, nor the one that it was forked from"):
        read(*recorded_by(tmp_path, 11, "fork"))


# --- leaving a text out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["[]", "[[20, 21], [23, 30]]"])
def test_no_step_of_a_fork_with_the_printed_samples_sees_the_text(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also not the samples that only the fork reads: the run reads a part of its text."""
    words = [f"{n} {n * n} apples and {n % 7} pears are in basket {n}" for n in range(300)]
    words[5] = " ".join(["garbled", *(f"{n * n * 31 % 977:x}" for n in range(150))])
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    given = tiny(tmp_path / "mine.jsonl", tmp_path, eval__every=0, train__steps=30)
    succeeded(ranks(1, *given, "--run.name=run", f"--data.skip_samples={own}"))

    assert which([str(tmp_path / "run"), "--find", "garbled"]) == 0
    before = capsys.readouterr().out
    assert len(set(re.findall(r"sample \d+", before))) > 4
    (skipped,) = re.findall(r'start again, or fork from a checkpoint before step \d+, with "(.*)"', before)
    succeeded(ranks(1, *given, "--run.name=without", skipped))
    assert which([str(tmp_path / "without"), "--find", "garbled"]) == 0
    assert "seen at 0 steps of 30: -\n" in capsys.readouterr().out
