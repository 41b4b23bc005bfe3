"""Loss spikes: detected, logged, skipped, or the end of a run; and ranges of samples that a run is told to skip."""

import functools
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import assert_same_end, checkpoint, losses, ranks, records, succeeded, tensors, tiny
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.config.schema import DataConfig
from torchtitan_lite.errors import EXIT_WOULD_REPEAT
from torchtitan_lite.run.attempts import newest_status
from torchtitan_lite.tools.past_steps import read_record

extended = pytest.mark.extended
POISON = {"POISON": "[[96, 102]]"}  # all of step 17
PLAIN: dict[str, Any] = {"model__n_layers": 1, "train__steps": 24, "eval__every": 0, "checkpoint__every": 6}
SPIKE: dict[str, Any] = {"spike__window": 6, "spike__loss_deviations": 4.0}
SKIP = PLAIN | SPIKE | {"spike__action": "skip"}
STOP = PLAIN | SPIKE | {"spike__action": "stop"}
FLOAT16 = {"fsdp__param_dtype": "float16", "grad_scaler__init_scale": 256.0, "grad_scaler__growth_interval": 4}
MUON = {"optim__name": "muon", "optim__lr": 5e-3, "spike__loss_deviations": 2.0}  # it learns less in so few steps
SGD = {"optim__name": "sgd", "optim__lr": 0.5, "spike__loss_deviations": 2.0}
Run = Callable[..., str]


def trained(text: Path, folder: Path, n: int, name: str, env: Any = POISON, code: int = 0, **keys: Any) -> str:
    """The output of a run, also on stderr if it must fail."""
    return obeyed(n, tiny(text, folder, run__name=name, **keys), env, code)


def obeyed(n: int, words: list[str], env: Any = POISON, code: int = 0, fault: str = "") -> str:
    result = ranks(n, *words, entry="tests.run.spike_worker", env=env, fault=fault)
    if not code:
        return succeeded(result)
    assert result.returncode == (code if n == 1 else 1), "torchrun's own"
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


@pytest.fixture
def run(text: Path, tmp_path: Path) -> Run:
    return functools.partial(trained, text, tmp_path)


# --- detection --------------------------------------------------------------------------------------------------


def test_nothing_is_a_spike_during_the_warm_up(run: Run) -> None:
    keys = {"spike__loss_deviations": 1.0, "train__steps": 18, "optim__warmup_steps": 17}
    assert not re.search(r"SPIKE   step (1[0-7]|\d):", run(1, "run", **SKIP | keys))


# --- skip -------------------------------------------------------------------------------------------------------

SKIPS: dict[str, tuple[int, dict[str, Any]]] = {
    "adamw": (2, {}),
    "sgd": (2, SGD),
    "muon": (2, MUON | {"optim__ema_decay": 0.9}),
    "float16": (1, FLOAT16),
}


@pytest.mark.parametrize("name", [name if name == "adamw" else pytest.param(name, marks=extended) for name in SKIPS])
def test_the_update_of_a_skipped_spike_is_withheld_bit_for_bit(name: str, run: Run, tmp_path: Path) -> None:
    n, keys = SKIPS[name]
    said = run(n, "run", **SKIP | {"train__steps": 18, "checkpoint__every": 1} | keys)
    assert re.search(
        r"SPIKE   step 17: loss 6.*; largest gradient against its own mean: (inputs|layers.0|head), ", said
    )
    assert said.count("SPIKE") == 1
    folders = [checkpoint(tmp_path / "run", step) for step in (16, 17, 18)]
    before, at, after = map(tensors, folders)
    assert all(at[name].equal(before[name]) for name in before)
    assert not all(after[name].equal(at[name]) for name in before)
    states = [storage.read_state(folder) for folder in folders]
    assert [state.skipped for state in states] == [[], [17], [17]]
    (found,) = [record["spike"] for record in records(tmp_path / "run") if "spike" in record]
    assert (found["samples"], found["action"]) == ([96, 102], "skip")
    assert found["loss"] not in states[2].spikes["losses"]
    assert len(states[2].spikes["losses"]) == 6
    if name == "float16":  # a spike is a step without overflow
        assert states[1].grad_scaler == {**states[0].grad_scaler, "good_steps": 1, "skipped_steps": 0}


def test_a_resume_skips_the_same_spikes(text: Path, run: Run, tmp_path: Path) -> None:
    """The window is part of the checkpoint of step 14 or 15: it would not be full at step 17 otherwise."""
    words = tiny(text, tmp_path, run__name="run", **SKIP)
    (left,) = re.findall(r"stopped after step (1[45]) of 24", obeyed(1, words, fault="term:0:14"))
    said = obeyed(1, words)
    assert f"resumed after step {left}" in said
    assert "SPIKE   step 17: loss 6." in said
    run(1, "straight", **SKIP)
    assert_same_end(tmp_path / "run", tmp_path / "straight", 24)
    mine, theirs = (storage.read_state(checkpoint(tmp_path / name, 24)) for name in ("run", "straight"))
    assert (mine.spikes, mine.skipped) == (theirs.spikes, theirs.skipped)


# --- stop -------------------------------------------------------------------------------------------------------


STOPS: dict[str, tuple[int, dict[str, Any], int | None]] = {  # number of ranks, options, where the fork starts
    "logged": (1, {}, 12),
    "read in the next step": (1, {"log__every": 5, "checkpoint__async_save": True}, 12),
    "a step that would be saved": (1, {"checkpoint__every": 17}, None),
    "with a range of its own": (2, {"data__skip_samples": "[[12, 20]]", "checkpoint__every": 5}, 15),
}


@pytest.mark.parametrize("name", [name if name == "logged" else pytest.param(name, marks=extended) for name in STOPS])
def test_the_printed_command_of_a_stopped_run_trains_without_the_samples(name: str, run: Run, tmp_path: Path) -> None:
    n, keys, saved = STOPS[name]
    poison = 96 if "data__skip_samples" not in keys else 104  # its batches begin at 0, 6, 20, 26, ...
    env, end = {"POISON": f"[[{poison}, {poison + 6}]]"}, poison + 6
    said = run(n, "run", env=env, code=EXIT_WOULD_REPEAT, **STOP | keys)
    assert re.search(rf"SPIKE   step 17: loss 6\..*; run samples {poison} to {end - 1}; the update was withheld", said)
    assert f"run samples {poison} to {end - 1}. The update was withheld, and nothing was saved after it" in said
    steps = storage.find_steps(tmp_path / "run/checkpoints")
    assert steps[-1:] == ([saved] if saved else [])
    status = newest_status(tmp_path / "run")
    assert (status["status"], status["reason"] in said) == ("failed", True)

    (line,) = {line.strip() for line in said.splitlines() if "--run.name=" in line and "-without-" in line}
    launcher, _, rest = line.partition(" train.py ")
    assert Path(launcher.split()[0]).name in ("torchrun", "python", Path(sys.executable).name)
    words = shlex.split(rest)
    assert [word for word in words if word.startswith("--checkpoint.resume")] == [
        f"--checkpoint.resume={checkpoint(tmp_path / 'run', step)}" for step in steps[-1:]
    ]
    own = json.loads(keys.get("data__skip_samples", "[]"))
    assert words[-1] == f"--data.skip_samples={[*own, [poison, end]]}"
    said = obeyed(n, words, env)
    assert "SPIKE" not in said
    assert (f", after its step {saved};" in said) == bool(saved)
    fork, record = tmp_path / "run-without-17", read_record(tmp_path / "run-without-17")
    assert [record.steps[step].samples.start for step in (16, 17, 18)] == [poison - 6, end, end + 6]
    run(n, "told", env=env, **PLAIN | keys | {"data__skip_samples": str([*own, [poison, end]])})
    before, after, told = (losses(folder) for folder in (tmp_path / "run", fork, tmp_path / "told"))
    assert all(after[step] == before[step] for step in after if step < 17)
    assert after == {step: values for step, values in told.items() if step > (saved or 0)}
    mine, theirs = (tensors(checkpoint(folder, 24)) for folder in (fork, tmp_path / "told"))
    assert all(mine[name].equal(theirs[name]) for name in theirs)


# --- samples that a run is told to skip -------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    bounds=st.lists(st.integers(0, 300), min_size=0, max_size=8, unique=True).map(sorted),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=60),
)
def test_no_batch_touches_a_skipped_range_and_none_is_lost_without_need(bounds: list[int], sizes: list[int]) -> None:
    skipped = [list(pair) for pair in zip(bounds[::2], bounds[1::2], strict=False)]
    data, at = DataConfig(skip_samples=skipped), 0
    for size in sizes:
        first = data.position(at, size)
        assert first >= at
        assert not any(first < end and begin < first + size for begin, end in skipped)
        lost = set(range(at, first)) - {i for begin, end in skipped for i in range(begin, end)}
        assert len(lost) <= (size - 1) * len(skipped)
        at = first + size
    assert DataConfig(skip_samples=[[0, 10], [10, 20]]).position(0, 4) == 20
