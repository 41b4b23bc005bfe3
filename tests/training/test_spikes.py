"""Loss spikes: detected, logged, skipped, rewound; and ranges of samples that a run is told to skip."""

import errno
import functools
import json
import math
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import assert_same_end, checkpoint, losses, ranks, records, succeeded, tensors, tiny
from tests.monitoring.test_trackers import scalars_of
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.safetensors_file import sha256_of, specs_of, write_tensors
from torchtitan_lite.checkpointing.select import select_checkpoint
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import CheckpointConfig, DataConfig
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import ConfigError, UnreadableError
from torchtitan_lite.tools.incidents import which
from torchtitan_lite.tools.incidents.record import read_record
from torchtitan_lite.tools.report.figures import marks
from torchtitan_lite.tools.report.page import notes, page
from torchtitan_lite.tools.report.runs import read_run
from torchtitan_lite.training.spikes import rewind
from torchtitan_lite.training.spikes.watch import SpikeError, limit, require_progress

extended = pytest.mark.extended
POISON = {"POISON": "[[96, 102]]"}  # all of step 17
PLAIN: dict[str, Any] = {"model__n_layers": 1, "train__steps": 24, "eval__every": 0, "checkpoint__every": 6}
SPIKE: dict[str, Any] = {"spike__window": 6, "spike__loss_deviations": 4.0}
SKIP = PLAIN | SPIKE | {"spike__action": "skip"}
REWIND = PLAIN | SPIKE | {"spike__action": "rewind"}
TOLD = {"data__skip_samples": "[[72,102]]"}  # from the checkpoint of step 12 to the end of step 17
FLOAT16 = {"fsdp__param_dtype": "float16", "grad_scaler__init_scale": 256.0, "grad_scaler__growth_interval": 4}
MUON = {"optim__name": "muon", "optim__lr": 5e-3, "spike__loss_deviations": 2.0}  # it learns less in so few steps
SGD = {"optim__name": "sgd", "optim__lr": 0.5, "spike__loss_deviations": 2.0}
IN_THE_NEXT_STEP = {"log__every": 5}  # where the result is read, unless a step is logged or saved
Run = Callable[..., str]


def trained(
    text: Path, folder: Path, n: int, name: str, *flags: str, env: Any = POISON, code: int = 0, **keys: Any
) -> str:
    """The output of a run, also on stderr if it must fail."""
    command = [*tiny(text, folder, run__name=name, **keys), *flags]
    result = ranks(n, *command, entry="tests.training.spike_worker", env=env)
    if not code:
        return succeeded(result)
    assert result.returncode
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


@pytest.fixture
def run(text: Path, tmp_path: Path) -> Run:
    return functools.partial(trained, text, tmp_path)


def lines(folder: Path, file: str = "spikes.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def ends_as(one: Path, other: Path, step: int = 24, every: int = 1) -> None:
    """It ends as the other one, and no step is logged twice."""
    logged = [record["step"] for record in records(one) if "loss" in record]
    assert logged == [number for number in range(1, step + 1) if number % every == 0 or number == step]
    assert_same_end(one, other, step)


@pytest.fixture(scope="module")
def rewound(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that met the poisoned samples at step 17, and went back to step 12."""
    folder = tmp_path_factory.mktemp("rewound")
    said = trained(text, folder, 2, "run", **REWIND, log__trackers='["tensorboard"]')
    assert "SPIKE   step 17: loss 6." in said
    assert f"REWOUND from step 17 to {checkpoint(folder / 'run', 12)} (1 of at most 10)" in said
    assert "without the samples 72 to 101: as a run with --data.skip_samples=[[72,102]]" in said
    assert "done    24 steps" in said
    seconds = json.loads((folder / "run" / "run.json").read_text())["goodput"]["seconds"]
    assert seconds["repeated"] > 0
    assert seconds["load"] > 0
    return folder / "run"


# --- detection --------------------------------------------------------------------------------------------------


def test_a_limit_needs_a_full_window_and_ignores_outliers() -> None:
    assert limit([1.0] * 7, 8, 8.0) == math.inf
    assert limit([1.0] * 8, 8, 0.0) == math.inf
    assert limit([2.0] * 8, 8, 8.0) == pytest.approx(2.0 + 8 * 0.02 * 2.0)  # not at 2.0, though nothing deviates
    noisy = [2.0, 2.2, 1.8, 2.1, 1.9, 2.2, 1.8, 2.0]
    assert limit(noisy, 8, 8.0) == pytest.approx(2.0 + 8 * 1.4826 * 0.15)
    assert limit([*noisy[:7], 1e6], 8, 8.0) < 6
    assert limit([9.0, 9.0, *noisy], 8, 8.0) == limit(noisy, 8, 8.0)  # saved with a longer window


@extended
def test_logging_changes_nothing(run: Run, tmp_path: Path) -> None:
    assert "SPIKE   step 17: loss 6." in run(1, "log", **PLAIN, **SPIKE, spike__action="log")
    run(1, "off", **PLAIN)
    ends_as(tmp_path / "log", tmp_path / "off")
    (found,) = [record for record in records(tmp_path / "log") if "spike" in record]
    assert (found["step"], found["spike"]["samples"], found["spike"]["action"]) == (17, [96, 102], "log")
    assert found["spike"]["loss"] == losses(tmp_path / "log")[17][0] > found["spike"]["loss_limit"]
    assert not (tmp_path / "off/spikes.jsonl").exists()


@extended
@pytest.mark.parametrize("warmup", [16, 17])
def test_nothing_is_a_spike_during_the_warm_up(warmup: int, run: Run) -> None:
    keys = SKIP | {"spike__loss_deviations": 1.0, "train__steps": 18, "optim__warmup_steps": warmup}
    said = run(1, "run", **keys)
    assert ("SPIKE   step 17: " in said) == (warmup == 16)
    assert "SPIKE   step 16: " not in said


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
    assert "SPIKE   step 17: loss 6." in said
    assert said.count("SPIKE") == 1
    folders = [checkpoint(tmp_path / "run", step) for step in (16, 17, 18)]
    before, at, after = map(tensors, folders)
    assert all(at[name].equal(before[name]) for name in before)
    assert not all(after[name].equal(at[name]) for name in before)
    states = [storage.read_state(folder) for folder in folders]
    assert (states[2].spikes["skipped"], states[2].skipped) == ([17], [])
    (found,) = [record["spike"] for record in records(tmp_path / "run") if "spike" in record]
    assert found["loss"] not in states[2].spikes["losses"]
    assert len(states[2].spikes["losses"]) == 6
    if name == "float16":  # a spike is a step without overflow
        assert states[1].grad_scaler == {**states[0].grad_scaler, "good_steps": 1, "skipped_steps": 0}


@extended
def test_too_many_skipped_spikes_in_a_row_stop_the_run(run: Run, tmp_path: Path) -> None:
    said = run(1, "run", env={"POISON": "[[96, 140]]"}, code=1, **SKIP, train__max_skipped=2)
    assert "step 19: loss 6." in said
    assert "This and the 2 steps before it were skipped (train.max_skipped)" in said
    assert storage.find_steps(tmp_path / "run/checkpoints") == [6, 12, 18]


def test_spikes_and_steps_that_are_not_finite_are_counted_together() -> None:
    config = SimpleNamespace(train=SimpleNamespace(max_skipped=3))
    s: Any = SimpleNamespace(config=config, guard=SimpleNamespace(skipped=[3, 5]))
    s.state = SimpleNamespace(step=5, spikes={"skipped": [1, 4]})
    require_progress(s, "why")
    s.config.train.max_skipped = 2
    with pytest.raises(SpikeError, match=r"^step 5: why\. This and the 2 steps before it were skipped"):
        require_progress(s, "why")


# --- rewind -----------------------------------------------------------------------------------------------------


def test_a_rewind_is_bit_for_bit_a_run_that_was_told_to_skip(rewound: Path, run: Run, tmp_path: Path) -> None:
    run(2, "told", **PLAIN, **TOLD)
    ends_as(rewound, tmp_path / "told")
    each, once = ({r["step"]: r["mean_loss"] for r in records(f) if "loss" in r} for f in (rewound, tmp_path / "told"))
    assert each == once, "the sums of the abandoned steps are gone"
    mine, theirs = (storage.read_state(checkpoint(folder, 24)) for folder in (rewound, tmp_path / "told"))
    assert mine.jumps == theirs.jumps == [[12, 72, 102]]
    assert (mine.samples_consumed, mine.tokens) == (theirs.samples_consumed, theirs.tokens) == (174, 24 * 6 * 32)


RETAINED = {"checkpoint__every": 3, "checkpoint__keep_latest": 1, "spike__rewind_steps": 6}
CHECKED = {"spike__memory_check_every": 1}  # a digest must not outlast a rewind
BACKGROUND = {"checkpoint__async_save": True, **IN_THE_NEXT_STEP}
SHARDED = {"checkpoint__state_dict": "sharded", "checkpoint__api": "dcp"}
# name -> number of ranks, the first poisoned sample, options, and what is skipped
REWINDS: dict[str, tuple[int, int, dict[str, Any], str]] = {
    # the loss scale has grown by the spike, and goes back too
    "float16": (1, 96, FLOAT16 | {"grad_scaler__growth_interval": 3, "grad_scaler__init_scale": 64.0}, "[[72,102]]"),
    "batch schedule": (1, 80, {"train__batch_schedule": "[[8,4]]"}, "[[64,84]]"),
    "saved by DTensor, in the background": (2, 96, SGD | BACKGROUND, "[[72,102]]"),
    "saved by DCP, in the background": (2, 96, MUON | BACKGROUND | SHARDED | CHECKED, "[[72,102]]"),
    "further back": (1, 96, RETAINED, "[[54,102]]"),
    "with a range of its own": (1, 96, {"data__skip_samples": "[[104,110]]"}, "[[72,102],[104,110]]"),
    # which begins at the newest checkpoint, and is no earlier rewind
    "further back than a range": (1, 102, {"data__skip_samples": "[[72,78]]", "spike__rewind_steps": 8}, "[[36,108]]"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in [*REWINDS][:2] else extended) for n in REWINDS])
def test_a_rewind_restores_what_changes_from_step_to_step(name: str, run: Run, tmp_path: Path) -> None:
    n, poison, keys, skipped = REWINDS[name]
    poisoned = {"POISON": f"[[{poison}, {poison + 6}]]"}
    said = run(n, "rewound", env=poisoned, **REWIND | keys)
    assert re.findall(r"REWOUND from step 17.* as a run with --data.skip_samples=(\S+)", said, re.S) == [skipped]
    plain = {key: value for key, value in keys.items() if not key.startswith("spike")}
    run(n, "told", env=poisoned, **PLAIN | plain | {"data__skip_samples": skipped})
    ends_as(tmp_path / "rewound", tmp_path / "told", every=keys.get("log__every", 1))
    states = [storage.read_state(checkpoint(tmp_path / name, 24)) for name in ("rewound", "told")]
    for field in ("samples_consumed", "tokens", "grad_scaler", "jumps"):
        same = getattr(states[0], field) == getattr(states[1], field)
        assert same or (field == "jumps" and "data__skip_samples" in keys), field  # two jumps that meet are one there
    if name == "float16":
        assert states[0].grad_scaler["scale"] > 64
    if name == "further back":
        aside = sorted(path.name for path in (tmp_path / "rewound/checkpoints").glob(".old-*"))
        assert aside == [".old-step-00000012", ".old-step-00000015"]
    if name == "with a range of its own":
        record = read_record(tmp_path / "rewound")
        assert [record.samples(step).start for step in (12, 13, 14)] == [66, 110, 116]


def test_a_stop_at_a_spike_waits_for_the_rewind_to_be_saved(rewound: Path, run: Run, tmp_path: Path) -> None:
    said = run(2, "run", env=POISON | {"STOP": "1:17"}, **REWIND)  # the host reads both at once
    assert "REWOUND from step 17" in said
    assert "stopped after step 13 of 24" in said
    saved = storage.read_state(checkpoint(tmp_path / "run", 13))
    assert (saved.spikes["rewinds"], saved.jumps) == (1, [[12, 72, 102]])
    assert "done    11 steps" in run(2, "run", **REWIND)
    assert_same_end(tmp_path / "run", rewound, 24)


def test_an_unreadable_checkpoint_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be intact: the run stops, rather than to go back further and set it aside."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        world = World(0, 1, torch.device("cpu"), 1)
        for step in (2, 4):
            folder = storage.begin(tmp_path, step)
            tensor = {"a": torch.ones(3)}
            names = storage.MODEL, storage.OPTIMIZER
            files = {name: write_tensors(folder / name, specs_of(tensor), tensor.__getitem__) for name in names}
            storage.commit(folder, TrainState(step=step), "full", 1, files)
        honest = sha256_of

        def broken(path: Path) -> str:
            if "00000004" in str(path):
                raise OSError(errno.EIO, "Input/output error", str(path))
            return honest(path)

        monkeypatch.setattr(storage, "sha256_of", broken)
        loader = SimpleNamespace(config=CheckpointConfig(), folder=tmp_path)
        loader.load = lambda _: select_checkpoint(loader.folder, loader.config, world)
        s: Any = SimpleNamespace(checkpointer=loader, state=TrainState(), log=SimpleNamespace(info=print))
        with pytest.raises(UnreadableError, match="Input/output error"):
            rewind._load(s, [2, 4])
    finally:
        dist.destroy_process_group()


def test_what_was_abandoned_is_in_spikes_jsonl(rewound: Path) -> None:
    head, *moved = lines(rewound)
    assert (head["step"], head["back_to"], head["skipped"]) == (17, 12, [72, 102])
    assert head["spike"]["loss"] > head["spike"]["loss_limit"] > 5
    assert [record["step"] for record in moved if "loss" in record] == [13, 14, 15, 16]
    assert {record["rewind"] for record in (head, *moved)} == {1}
    (mark,) = [record for record in records(rewound) if "rewound_from" in record]
    assert (mark["step"], mark["rewound_from"], mark["rewound_samples"]) == (13, 17, [72, 102])


def test_tensorboard_has_each_step_once_after_a_rewind(rewound: Path) -> None:
    theirs = scalars_of(rewound / "tensorboard", "loss")
    assert [step for step, _ in theirs] == list(range(1, 25))
    assert dict(theirs) == pytest.approx({step: loss for step, (loss, _) in losses(rewound).items()})
    assert scalars_of(rewound / "tensorboard", "rewound_from") == [(13, 17.0)]


def forget(folder: Path, copy: Path, *steps: int) -> Path:
    """A copy of a run without these checkpoints: as if it had been killed before they were saved."""
    shutil.copytree(folder, copy)
    for step in steps:
        shutil.rmtree(checkpoint(copy, step))
    return copy


def test_killed_after_a_rewind_it_does_the_same_again(rewound: Path, run: Run, tmp_path: Path) -> None:
    """Between the rewind and the next save: the resume meets the spike again."""
    folder = forget(rewound, tmp_path / "run", 18, 24)
    killed = run(2, "run", env=POISON | {"KILL": "1:15"}, code=1, **REWIND)
    assert "REWOUND from step 17" in killed
    assert "KILLED at step 15" in killed
    said = run(2, "run", **REWIND)
    assert "resumed after step 12" in said
    assert "REWOUND from step 17" in said
    ends_as(folder, rewound)
    assert [r["step"] for r in lines(folder)] == [r["step"] for r in lines(rewound)], "no record stands twice"


@extended
def test_further_spikes_rewind_again_up_to_the_limit(run: Run, tmp_path: Path) -> None:
    """Steps 17 and 18 are poisoned: after the first rewind the second is step 13."""
    run = functools.partial(run, env={"POISON": "[[96, 108]]"})
    said = run(1, "run", **REWIND)
    assert said.count("REWOUND") == 2
    assert "without the samples 72 to 107" in said
    run(1, "told", **PLAIN, data__skip_samples="[[72,108]]")
    ends_as(tmp_path / "run", tmp_path / "told")
    state = storage.read_state(checkpoint(tmp_path / "run", 24))
    assert (state.spikes["rewinds"], state.jumps) == (2, [[12, 72, 108]])
    assert [r["rewind"] for r in lines(tmp_path / "run") if "back_to" in r] == [1, 2]
    assert "run: 2 rewinds, the last from step 13 to 12; " in notes([read_run(tmp_path / "run")])

    said = run(1, "limited", code=1, **REWIND, spike__max_rewinds=1)
    assert "step 13: loss 6." in said
    assert "The run has gone back 1 time (spike.max_rewinds), and does not again" in said
    assert json.loads((tmp_path / "limited/run.json").read_text())["status"] == "failed"
    assert storage.find_steps(tmp_path / "limited/checkpoints") == [6, 12]
    shutil.copytree(tmp_path / "limited", tmp_path / "by-hand")
    run(1, "by-hand", "--resume-with-changes", **REWIND, data__skip_samples="[[72,108]]")
    ends_as(tmp_path / "by-hand", tmp_path / "told")
    assert lines(tmp_path / "by-hand") == lines(tmp_path / "limited"), "what was abandoned is not made again"
    assert "equal   bit for bit" in run(1, "limited", "--replay=13", **REWIND), "the step that it ended at"
    run(1, "limited", **REWIND)  # the next command may go back more often
    ends_as(tmp_path / "limited", tmp_path / "told")


@extended
def test_without_a_checkpoint_a_spike_is_skipped(run: Run, tmp_path: Path) -> None:
    said = run(1, "run", **REWIND | {"checkpoint__every": 20})
    assert "note    there is no checkpoint to go back to: step 17 was skipped" in said
    assert storage.read_state(checkpoint(tmp_path / "run", 24)).spikes["skipped"] == [17]


@extended
@pytest.mark.parametrize("most", [1, 10])
def test_a_spike_soon_after_a_rewind_goes_back_to_the_same_checkpoint(most: int, run: Run) -> None:
    """Though spike.rewind_steps would go further back, where retention keeps nothing. Steps 29 and 23 (again) spike."""
    keys = REWIND | RETAINED | {"train__steps": 30, "spike__max_rewinds": most}
    said = run(1, "run", env={"POISON": "[[168, 174], [180, 186]]"}, code=int(most == 1), **keys)
    expected = [("29", "00000021"), ("23", "00000021")][:most]
    assert re.findall(r"REWOUND from step (\d+) to .*step-(\d+) ", said) == expected
    assert ("step 23: loss 6." in said.split("REWOUND")[-1]) == (most == 1)


@extended
def test_a_rewind_behind_a_change_moves_its_record(run: Run, tmp_path: Path) -> None:
    """A resume after step 12 makes batches smaller; step 19 goes back to step 9."""
    keys = REWIND | {"checkpoint__every": 3, "spike__rewind_steps": 9, "optim__schedule": "constant"}
    run = functools.partial(run, 1, "run", env={"POISON": "[[96, 100]]"})
    run(**keys | {"train__steps": 12})
    assert "REWOUND from step 19" in run("--resume-with-changes", **keys, train__global_batch_size=4)
    (change,) = lines(tmp_path / "run", "changes.jsonl")
    assert (change["step"], change["changed"]["train.global_batch_size"]) == (9, [6, 4])
    record = read_record(tmp_path / "run")
    assert [len(record.samples(step)) for step in (9, 10, 11, 13)] == [6, 4, 4, 4]


@extended
def test_a_damaged_checkpoint_is_passed_over(run: Run, tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "run", 12) / "model.safetensors"
    said = run(2, "run", env=POISON | {"DAMAGE": str(file)}, **REWIND)
    assert f"note    damaged: {file}: " in said
    assert f"REWOUND from step 17 to {checkpoint(tmp_path / 'run', 6)}" in said
    assert (tmp_path / "run/checkpoints/.old-step-00000012").is_dir()
    assert lines(tmp_path / "run")[0]["skipped"] == [36, 102]
    assert [record["step"] for record in records(tmp_path / "run") if "loss" in record] == list(range(1, 25))


# --- recheck ----------------------------------------------------------------------------------------------------

EQUAL = (
    "Computed again, it is equal bit for bit: this step was computed right. The cause is the data, the model, or "
    "weights that were damaged before"
)
DIFFERS = f"Computed again, it differs, so a machine computed wrong: rank {{}} ({socket.gethostname()}): the sum of"
CHECK = SKIP | {"train__steps": 18, "spike__recheck": True, "train__on_nonfinite": "skip"} | IN_THE_NEXT_STEP


def test_a_flipped_bit_in_a_product_is_told_from_the_data_and_names_its_rank(run: Run, tmp_path: Path) -> None:
    """Step 11 is hit on rank 1, step 17 is poisoned. The other steps do not notice that one was computed again."""
    run = functools.partial(run, 2, env=POISON | {"FLIP": "1:11"})
    said = run("run", **CHECK)
    assert "FLIP at step 11" in said
    (hit, poisoned) = re.findall(r"^note    step (1[17])(?: is not finite\.|:) (Computed again.*)$", said, re.M)
    assert hit[0] == "11"
    assert hit[1].startswith(DIFFERS.format(1))
    assert "rank 0" not in hit[1]
    assert poisoned == ("17", EQUAL)
    (found,) = [record["spike"] for record in records(tmp_path / "run") if record.get("spike") and record["step"] == 17]
    assert found["recheck"] == EQUAL
    run("without", **CHECK | {"spike__recheck": False})
    ends_as(tmp_path / "run", tmp_path / "without", 18, every=5)


@extended
@pytest.mark.parametrize("n", [1, 2])
def test_a_step_that_is_not_finite_is_computed_again_before_the_run_stops(n: int, text: Path, tmp_path: Path) -> None:
    """A NaN of the first forward pass only: the second time it is finite. Without [spike] action."""
    keys = PLAIN | {"train__steps": 8, "spike__recheck": True, "train__micro_batch_size": 6}
    result = ranks(n, *tiny(text, tmp_path, run__name="run", **keys), fault=f"nan:{n - 1}:6:forward")
    assert result.returncode == 1
    assert f"step 6: the loss is not finite on rank {n - 1}" in result.stderr
    assert DIFFERS.format(n - 1) in result.stderr
    result = ranks(n, *tiny(text, tmp_path, run__name="always", **keys, optim__lr=1e30, optim__max_norm="inf"))
    assert result.returncode == 1
    assert "not finite" in result.stderr
    assert EQUAL in result.stderr


@extended
def test_a_second_look_changes_nothing_in_float16_with_muon(run: Run, tmp_path: Path) -> None:
    keys = CHECK | FLOAT16 | MUON | {"fsdp__grad_sync": "last", "model__dropout": 0.1}
    assert EQUAL in run(2, "run", **keys)
    run(2, "without", **keys | {"spike__recheck": False})
    ends_as(tmp_path / "run", tmp_path / "without", 18, every=5)


# --- tools ------------------------------------------------------------------------------------------------------


def positions(folder: Path) -> list[tuple[int, int]]:
    record = read_record(folder)
    return [(record.samples(step).start, record.samples(step).stop) for step in range(1, 25)]


def test_each_step_of_a_run_that_rewound_has_its_samples(rewound: Path, tmp_path: Path) -> None:
    expected = [(6 * i, 6 * i + 6) for i in range(12)] + [(102 + 6 * i, 108 + 6 * i) for i in range(12)]
    assert positions(rewound) == expected
    assert positions(forget(rewound, tmp_path / "killed", 18, 24)) == expected  # metrics.jsonl alone tells it
    nothing = forget(rewound, tmp_path / "nothing", 6, 12, 18, 24)
    (nothing / "metrics.jsonl").unlink()
    file = nothing / "config.toml"
    file.write_text(file.read_text().replace("skip_samples = []", "skip_samples = [[72, 102]]"))
    assert positions(nothing) == expected  # steps that are still to come


def test_which_tells_what_was_skipped(rewound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        assert not which.main([str(rewound), *words])
        return capsys.readouterr().out

    def samples(said: str, beginning: str) -> set[int]:
        return {int(line.split()[3]) for line in said.splitlines() if line.startswith(beginning)}

    step = said("--step", "13")
    assert "note    the samples 72 to 101 were skipped before step 13" in step
    assert "step 13: samples 102 to 107" in step
    skipped = said("--samples", "72", "102")
    assert skipped.startswith("samples 72 to 101: ")
    assert samples(skipped, "step -") == set(range(72, 102))
    found = said("--find", "e", "--step", "11", "--to", "14")
    assert samples(found, "step 1") == {*range(60, 72), *range(102, 114)}
    assert which.main([str(rewound), "--samples", "9", "9"]) == 2
    assert "--samples needs the first sample and the one after the last" in capsys.readouterr().err


@pytest.mark.parametrize("step", [14, pytest.param(24, marks=extended)])
def test_a_run_that_rewound_is_replayed(step: int, rewound: Path, text: Path) -> None:
    said = trained(text, rewound.parent, 2, "run", f"--replay={step}", **REWIND)
    assert f"replay  steps {13 if step == 14 else 19} to {step}" in said
    assert ("note    rewind 1, from step 17 to 12, abandoned a step 14. The step that" in said) == (step == 14)
    assert "equal   bit for bit" in said


def test_the_report_marks_spikes_and_rewinds(rewound: Path, tmp_path: Path) -> None:
    run = read_run(rewound)
    assert marks(run) == [(13, "rewound from step 17")]
    assert "run: 1 rewind, the last from step 17 to 12; what was abandoned is in spikes.jsonl." in page([run])
    with (forget(rewound, tmp_path / "run") / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 20, "spike": {"action": "skip"}}\n{"step": 21, "spike": 3, "rewound_from": "<b>"}\n')
    run = read_run(tmp_path / "run")
    assert marks(run)[0] == (20, "spike skipped")
    assert "run: 1 loss spike, the first at step 20." in page([run])
    assert len(run.rewinds) == 1


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


@pytest.mark.parametrize(
    "wrong", [[[3]], [[0, 2**63 - 1]], [[5, 5]], [[5, 3]], [[0, 4], [3, 9]], [[8, 9], [1, 2]], [[-1, 4]], [[1, 2, 3]]]
)
def test_ranges_that_are_none_are_a_mistake_in_the_config(wrong: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match=r"data\.skip_samples = .* e\.g\. \[\[800, 960\], \[2400, 2480\]\]"):
        load.load(None, {"data.skip_samples": load.ConfigValue(wrong, "command line")})


@extended
def test_ranges_hold_on_other_world_sizes_and_across_a_resume(run: Run, tmp_path: Path) -> None:
    keys = PLAIN | {"optim__schedule": "constant"}
    run(2, "run", **keys | TOLD | {"train__steps": 10})
    run(1, "run", **keys, **TOLD)
    run(2, "straight", **keys, **TOLD)
    one, other = losses(tmp_path / "run"), losses(tmp_path / "straight")
    assert [value[0] for value in one.values()] == pytest.approx([value[0] for value in other.values()], rel=1e-4)
    assert "data.skip_samples = [[72, 102]] so far, [] here" in run(
        2, "straight", code=1, **keys, data__skip_samples="[]"
    )
