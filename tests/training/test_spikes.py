"""Loss spikes: detected, logged, skipped, rewound; and ranges of samples that a run is told to skip."""

import functools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import checkpoint, losses, ranks, records, succeeded, tensors, tiny
from tests.monitoring.test_trackers import scalars_of
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.config import load
from torchtitan_lite.config.schema import DataConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.tools.incidents import which
from torchtitan_lite.tools.incidents.record import read_record
from torchtitan_lite.tools.report.figures import marks
from torchtitan_lite.tools.report.page import notes, page
from torchtitan_lite.tools.report.runs import read_run
from torchtitan_lite.training.spikes.watch import SpikeError, limit, require_progress

extended = pytest.mark.extended
POISON = {"POISON": "[[96, 102]]"}  # all of step 17
PLAIN: dict[str, Any] = {"train__steps": 24, "eval__every": 0, "checkpoint__every": 6}
SPIKE: dict[str, Any] = {"spike__window": 6, "spike__loss_deviations": 4.0}
REWIND = PLAIN | SPIKE | {"spike__action": "rewind"}
TOLD = {"data__skip_samples": "[[72,102]]"}  # from the checkpoint of step 12 to the end of step 17


def run(
    n: int, text: Path, folder: Path, name: str, *, env: Any = None, **keys: Any
) -> subprocess.CompletedProcess[str]:
    command = tiny(text, folder, run__name=name, **keys)
    return ranks(n, *command, entry="tests.training.spike_worker", env=POISON if env is None else env)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "spikes.jsonl").read_text().splitlines()]


def assert_same_end(one: Path, other: Path, step: int = 24, every: int = 1) -> None:
    """The same losses and norms of each logged step, and the same tensors, bit for bit; no step twice."""
    logged = [record["step"] for record in records(one) if "loss" in record]
    assert logged == [number for number in range(1, step + 1) if number % every == 0 or number == step]
    assert losses(one) == losses(other)
    mine, theirs = (tensors(checkpoint(folder, step)) for folder in (one, other))
    assert mine.keys() == theirs.keys()
    assert all(mine[name].equal(theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def rewound(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks that met the poisoned samples at step 17, and went back to step 12."""
    folder = tmp_path_factory.mktemp("rewound")
    said = succeeded(run(2, text, folder, "run", **REWIND))
    assert "SPIKE   step 17: loss 6." in said
    assert f"REWOUND from step 17 to {checkpoint(folder / 'run', 12)} (1 of at most 10)" in said
    assert "without the samples 72 to 101: as a run with --data.skip_samples=[[72,102]]" in said
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
def test_logging_changes_nothing(text: Path, tmp_path: Path) -> None:
    said = succeeded(run(1, text, tmp_path, "log", **PLAIN, **SPIKE, spike__action="log"))
    assert "SPIKE   step 17: loss 6." in said
    succeeded(run(1, text, tmp_path, "off", **PLAIN))
    assert_same_end(tmp_path / "log", tmp_path / "off")
    (found,) = [record for record in records(tmp_path / "log") if "spike" in record]
    assert (found["step"], found["spike"]["samples"], found["spike"]["action"]) == (17, [96, 102], "log")
    assert found["spike"]["loss"] == losses(tmp_path / "log")[17][0] > found["spike"]["loss_limit"]
    assert not (tmp_path / "off/spikes.jsonl").exists()


@extended
@pytest.mark.parametrize("warmup", [16, 17])
def test_nothing_is_a_spike_during_the_warm_up(warmup: int, text: Path, tmp_path: Path) -> None:
    keys = PLAIN | SPIKE | {"spike__action": "skip", "spike__loss_deviations": 1.0, "train__steps": 18}
    said = succeeded(run(1, text, tmp_path, "run", **keys, optim__warmup_steps=warmup))
    assert ("SPIKE   step 17: " in said) == (warmup == 16)
    assert "SPIKE   step 16: " not in said


SKIPS: dict[str, tuple[int, dict[str, Any]]] = {
    "adamw": (2, {}),
    "sgd": (2, {"optim__name": "sgd", "optim__lr": 0.5, "spike__loss_deviations": 2.0}),
    "muon": (2, {"optim__name": "muon", "optim__lr": 5e-3, "optim__ema_decay": 0.9, "spike__loss_deviations": 2.0}),
    "float16": (
        1,
        {"fsdp__param_dtype": "float16", "grad_scaler__init_scale": 256.0, "grad_scaler__growth_interval": 4},
    ),
}


@pytest.mark.parametrize("name", [name if name == "adamw" else pytest.param(name, marks=extended) for name in SKIPS])
def test_the_update_of_a_skipped_spike_is_withheld_bit_for_bit(name: str, text: Path, tmp_path: Path) -> None:
    n, keys = SKIPS[name]
    more = {"train__steps": 18, "eval__every": 0, "checkpoint__every": 1, "spike__action": "skip"}
    said = succeeded(run(n, text, tmp_path, "run", **more | SPIKE | keys))
    assert "SPIKE   step 17: loss 6." in said
    assert said.count("SPIKE") == 1
    before, at, after = (tensors(checkpoint(tmp_path / "run", step)) for step in (16, 17, 18))
    assert all(at[name].equal(before[name]) for name in before)
    assert not all(after[name].equal(at[name]) for name in before)
    state = storage.read_state(checkpoint(tmp_path / "run", 18))
    assert state.spikes["skipped"] == [17]
    assert not state.skipped
    (found,) = [record["spike"] for record in records(tmp_path / "run") if "spike" in record]
    assert found["loss"] not in state.spikes["losses"]
    assert len(state.spikes["losses"]) == 6
    if name == "float16":  # a spike is a step without overflow
        scales = {step: storage.read_state(checkpoint(tmp_path / "run", step)).grad_scaler for step in (16, 17)}
        assert scales[17] == {"scale": scales[16]["scale"], "good_steps": 1, "skipped_steps": 0}


@extended
def test_too_many_skipped_spikes_in_a_row_stop_the_run(text: Path, tmp_path: Path) -> None:
    keys = PLAIN | SPIKE | {"spike__action": "skip", "train__max_skipped": 2}
    result = run(1, text, tmp_path, "run", env={"POISON": "[[96, 140]]"}, **keys)
    assert result.returncode == 1
    assert "step 19: loss 6." in result.stderr
    assert "This and the 2 steps before it were skipped (train.max_skipped)" in result.stderr
    assert storage.find_steps(tmp_path / "run/checkpoints") == [6, 12, 18]
    command = tiny(text, tmp_path, run__name="run", **keys)
    said = succeeded(
        ranks(1, *command, "--replay=19", entry="tests.training.spike_worker", env={"POISON": "[[96, 140]]"})
    )
    assert "equal   bit for bit: loss" in said


def test_spikes_and_steps_that_are_not_finite_are_counted_together() -> None:
    config = SimpleNamespace(train=SimpleNamespace(max_skipped=3))
    s: Any = SimpleNamespace(config=config, guard=SimpleNamespace(skipped=[3, 5]))
    s.state = SimpleNamespace(step=5, spikes={"skipped": [1, 4]})
    require_progress(s, "why")
    s.config.train.max_skipped = 2
    with pytest.raises(SpikeError, match=r"^step 5: why\. This and the 2 steps before it were skipped"):
        require_progress(s, "why")


# --- rewind -----------------------------------------------------------------------------------------------------


def test_a_rewind_is_bit_for_bit_a_run_that_was_told_to_skip(rewound: Path, text: Path, tmp_path: Path) -> None:
    succeeded(run(2, text, tmp_path, "told", **PLAIN, **TOLD))
    assert_same_end(rewound, tmp_path / "told")
    each, once = ({r["step"]: r["mean_loss"] for r in records(f) if "loss" in r} for f in (rewound, tmp_path / "told"))
    assert each == once, "the sums of the abandoned steps are gone"
    mine, theirs = (storage.read_state(checkpoint(folder, 24)) for folder in (rewound, tmp_path / "told"))
    assert mine.jumps == theirs.jumps == [[12, 72, 102]]
    assert (mine.samples_consumed, mine.tokens) == (theirs.samples_consumed, theirs.tokens) == (174, 24 * 6 * 32)


@pytest.mark.parametrize(
    ("keys", "poison"),
    [
        # the loss scale has grown by the spike, and goes back too
        ({"fsdp__param_dtype": "float16", "grad_scaler__growth_interval": 3, "grad_scaler__init_scale": 64.0}, 96),
        ({"train__batch_schedule": "[[8,4]]"}, 8 * 6 + 8 * 4),
    ],
    ids=["float16", "batch schedule"],
)
def test_a_rewind_restores_what_changes_from_step_to_step(
    keys: dict[str, Any], poison: int, text: Path, tmp_path: Path
) -> None:
    poisoned = {"POISON": f"[[{poison}, {poison + 6}]]"}
    said = succeeded(run(1, text, tmp_path, "rewound", env=poisoned, **REWIND, **keys))
    assert "REWOUND from step 17" in said
    skip = re.findall(r"as a run with --data.skip_samples=(\S+)", said)[-1]  # it names all ranges
    succeeded(run(1, text, tmp_path, "told", env=poisoned, **PLAIN, **keys, data__skip_samples=skip))
    assert_same_end(tmp_path / "rewound", tmp_path / "told")
    states = [storage.read_state(checkpoint(tmp_path / name, 24)) for name in ("rewound", "told")]
    for field in ("samples_consumed", "tokens", "grad_scaler", "jumps"):
        assert getattr(states[0], field) == getattr(states[1], field), field
    if "fsdp__param_dtype" in keys:
        assert states[0].grad_scaler["scale"] > 64


def test_what_was_abandoned_is_in_spikes_jsonl(rewound: Path) -> None:
    head, *moved = lines(rewound)
    assert (head["step"], head["back_to"], head["skipped"]) == (17, 12, [72, 102])
    assert head["spike"]["loss"] > head["spike"]["loss_limit"] > 5
    assert [record["step"] for record in moved if "loss" in record] == [13, 14, 15, 16]
    assert {record["rewind"] for record in (head, *moved)} == {1}
    (mark,) = [record for record in records(rewound) if "rewound_from" in record]
    assert (mark["step"], mark["rewound_from"], mark["rewound_samples"]) == (13, 17, [72, 102])


@extended
def test_a_rewind_ends_as_a_run_that_never_saw_the_samples(rewound: Path, text: Path, tmp_path: Path) -> None:
    succeeded(run(2, text, tmp_path, "clean", env={}, **PLAIN))
    last = [
        sum(values[step][0] for step in range(19, 25)) / 6 for values in (losses(rewound), losses(tmp_path / "clean"))
    ]
    assert last[0] == pytest.approx(last[1], abs=0.1)


def test_killed_after_a_rewind_it_does_the_same_again(rewound: Path, text: Path, tmp_path: Path) -> None:
    """Between the rewind and the next save: the resume meets the spike again."""
    shutil.copytree(rewound, tmp_path / "run")
    folder = tmp_path / "run"
    for step in (18, 24):
        shutil.rmtree(checkpoint(folder, step))
    killed = run(2, text, tmp_path, "run", env=POISON | {"KILL": "1:15"}, **REWIND)
    assert killed.returncode
    assert "REWOUND from step 17" in killed.stdout
    assert "KILLED at step 15" in killed.stdout
    said = succeeded(run(2, text, tmp_path, "run", **REWIND))
    assert "resumed after step 12" in said
    assert "REWOUND from step 17" in said
    assert_same_end(folder, rewound)
    assert [r["step"] for r in lines(folder)] == [r["step"] for r in lines(rewound)], "no record stands twice"


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optim__name": "sgd", "optim__lr": 0.5},
    "muon": {"optim__name": "muon", "optim__lr": 5e-3},
}
LOW = {"spike__loss_deviations": 2.0}  # these learn less in so few steps
IN_THE_NEXT_STEP = {"log__every": 5}  # where the result is read, unless a step is logged or saved


@pytest.fixture(scope="module")
def told(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Path]:
    """A run on so many ranks that was told to skip, once for each optimizer."""
    folder = tmp_path_factory.mktemp("told")

    @functools.cache
    def made(n: int, optimizer: str) -> Path:
        succeeded(run(n, text, folder, f"{optimizer}{n}", **PLAIN, **TOLD, **OPTIMIZERS[optimizer], **IN_THE_NEXT_STEP))
        return folder / f"{optimizer}{n}"

    return made


WAYS = [
    pytest.param(*way, n, n == 2, marks=extended)
    for way in (("full", "dtensor"), ("full", "dcp"), ("sharded", "dtensor"), ("sharded", "dcp"))
    for n in (1, 2)
]


@pytest.mark.parametrize(("state_dict", "api", "n", "async_save"), WAYS)
def test_all_ways_of_saving_rewind(
    state_dict: str, api: str, n: int, async_save: bool, told: Callable[[int, str], Path], text: Path, tmp_path: Path
) -> None:
    keys = {"checkpoint__state_dict": state_dict, "checkpoint__api": api, "checkpoint__async_save": async_save}
    optimizer = "muon" if api == "dcp" else "sgd"
    said = succeeded(run(n, text, tmp_path, "run", **REWIND | LOW | OPTIMIZERS[optimizer] | keys | IN_THE_NEXT_STEP))
    assert said.count("REWOUND") == 1
    assert_same_end(tmp_path / "run", told(n, optimizer), every=5)


@extended
def test_further_spikes_rewind_again_up_to_the_limit(text: Path, tmp_path: Path) -> None:
    """Steps 17 and 18 are poisoned: after the first rewind the second is step 13."""
    env = {"POISON": "[[96, 108]]"}
    said = succeeded(run(1, text, tmp_path, "run", env=env, **REWIND))
    assert said.count("REWOUND") == 2
    assert "without the samples 72 to 107" in said
    succeeded(run(1, text, tmp_path, "told", env=env, **PLAIN, data__skip_samples="[[72,108]]"))
    assert_same_end(tmp_path / "run", tmp_path / "told")
    state = storage.read_state(checkpoint(tmp_path / "run", 24))
    assert (state.spikes["rewinds"], state.jumps) == (2, [[12, 72, 108]])
    assert [r["rewind"] for r in lines(tmp_path / "run") if "back_to" in r] == [1, 2]

    assert "run: 2 rewinds, the last from step 13 to 12; " in notes([read_run(tmp_path / "run")])

    result = run(1, text, tmp_path, "limited", env=env, **REWIND, spike__max_rewinds=1)
    assert result.returncode == 1
    assert "step 13: loss 6." in result.stderr
    assert "The run has gone back 1 time (spike.max_rewinds), and does not again" in result.stderr
    assert "Traceback" not in result.stderr
    assert json.loads((tmp_path / "limited/run.json").read_text())["status"] == "failed"
    assert storage.find_steps(tmp_path / "limited/checkpoints") == [6, 12]
    shutil.copytree(tmp_path / "limited", tmp_path / "by-hand")
    by_hand = tiny(text, tmp_path, run__name="by-hand", **REWIND, data__skip_samples="[[72,108]]")
    succeeded(ranks(1, *by_hand, "--resume-with-changes", entry="tests.training.spike_worker", env=env))
    assert_same_end(tmp_path / "by-hand", tmp_path / "told")
    assert lines(tmp_path / "by-hand") == lines(tmp_path / "limited"), "what was abandoned is not made again"
    command = tiny(text, tmp_path, run__name="limited", **REWIND)
    said = succeeded(
        ranks(1, *command, "--replay=13", entry="tests.training.spike_worker", env=env)
    )  # the one that it ended at
    assert "equal   bit for bit" in said
    succeeded(run(1, text, tmp_path, "limited", env=env, **REWIND))  # the next command may go back more often
    assert_same_end(tmp_path / "limited", tmp_path / "told")


@extended
def test_without_a_checkpoint_a_spike_is_skipped(text: Path, tmp_path: Path) -> None:
    said = succeeded(run(1, text, tmp_path, "run", **REWIND | {"checkpoint__every": 20}))
    assert "note    there is no checkpoint to go back to: step 17 was skipped" in said
    assert storage.read_state(checkpoint(tmp_path / "run", 24)).spikes["skipped"] == [17]


@extended
def test_a_rewind_can_go_further_back_and_sets_later_checkpoints_aside(text: Path, tmp_path: Path) -> None:
    keys = REWIND | {"checkpoint__every": 3, "checkpoint__keep_latest": 1, "spike__rewind_steps": 6}
    said = succeeded(run(1, text, tmp_path, "run", **keys))
    assert f"REWOUND from step 17 to {checkpoint(tmp_path / 'run', 9)}" in said
    aside = sorted(path.name for path in (tmp_path / "run/checkpoints").glob(".old-*"))
    assert aside == [".old-step-00000012", ".old-step-00000015"]
    assert not checkpoint(tmp_path / "run", 6).exists()
    succeeded(run(1, text, tmp_path, "told", **PLAIN, data__skip_samples="[[54,102]]"))
    assert_same_end(tmp_path / "run", tmp_path / "told")


@extended
@pytest.mark.parametrize("most", [1, 10])
def test_a_spike_soon_after_a_rewind_goes_back_to_the_same_checkpoint(most: int, text: Path, tmp_path: Path) -> None:
    """Though spike.rewind_steps would go further back, where retention keeps nothing. Steps 29 and 23 (again) spike."""
    keys = PLAIN | SPIKE | {"spike__action": "rewind", "spike__rewind_steps": 6, "train__steps": 30}
    keys |= {"checkpoint__every": 3, "checkpoint__keep_latest": 1, "spike__max_rewinds": most}
    result = run(1, text, tmp_path, "run", env={"POISON": "[[168, 174], [180, 186]]"}, **keys)
    if most == 1:
        assert result.returncode == 1
        assert "step 23: loss 6." in result.stderr
        return
    assert re.findall(r"REWOUND from step (\d+) to .*step-(\d+) ", succeeded(result)) == [
        ("29", "00000021"),
        ("23", "00000021"),
    ]


@extended
def test_the_option_of_a_rewind_has_all_samples_that_were_skipped(text: Path, tmp_path: Path) -> None:
    said = succeeded(run(1, text, tmp_path, "run", **REWIND, data__skip_samples="[[104,110]]"))
    (option,) = re.findall(r"as a run with --(data\.skip_samples=.*)$", said, re.M)
    assert option == "data.skip_samples=[[72,102],[104,110]]"
    record = read_record(tmp_path / "run")
    assert [record.samples(step).start for step in (12, 13, 14)] == [66, 110, 116]
    succeeded(run(1, text, tmp_path, "told", **PLAIN, data__skip_samples=option.partition("=")[2]))
    assert_same_end(tmp_path / "run", tmp_path / "told")


@extended
def test_a_rewind_behind_a_change_moves_its_record(text: Path, tmp_path: Path) -> None:
    """A resume after step 12 makes batches smaller; step 19 goes back to step 9."""
    keys = REWIND | {"checkpoint__every": 3, "spike__rewind_steps": 9, "optim__schedule": "constant"}
    env = {"POISON": "[[96, 100]]"}
    succeeded(run(1, text, tmp_path, "run", env=env, **keys | {"train__steps": 12}))
    smaller = tiny(text, tmp_path, run__name="run", **keys | {"train__global_batch_size": 4})
    said = succeeded(ranks(1, *smaller, "--resume-with-changes", entry="tests.training.spike_worker", env=env))
    assert "REWOUND from step 19" in said
    (change,) = [json.loads(line) for line in (tmp_path / "run/changes.jsonl").read_text().splitlines()]
    assert (change["step"], change["changed"]["train.global_batch_size"]) == (9, [6, 4])
    record = read_record(tmp_path / "run")
    assert [len(record.samples(step)) for step in (9, 10, 11, 13)] == [6, 4, 4, 4]


@extended
def test_a_damaged_checkpoint_is_passed_over(text: Path, tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "run", 12) / "model.safetensors"
    said = succeeded(run(2, text, tmp_path, "run", env=POISON | {"DAMAGE": str(file)}, **REWIND))
    assert f"note    damaged: {file}: " in said
    assert f"REWOUND from step 17 to {checkpoint(tmp_path / 'run', 6)}" in said
    assert (tmp_path / "run/checkpoints/.old-step-00000012").is_dir()
    assert lines(tmp_path / "run")[0]["skipped"] == [36, 102]
    assert [record["step"] for record in records(tmp_path / "run") if "loss" in record] == list(range(1, 25))


@extended
def test_tensorboard_has_each_step_once_after_a_rewind(text: Path, tmp_path: Path) -> None:
    succeeded(run(1, text, tmp_path, "run", **REWIND, log__trackers='["tensorboard"]'))
    ours = [(r["step"], r["loss"]) for r in records(tmp_path / "run") if "loss" in r]
    theirs = scalars_of(tmp_path / "run/tensorboard", "loss")
    assert [step for step, _ in theirs] == [step for step, _ in ours] == list(range(1, 25))
    assert [value for _, value in theirs] == pytest.approx([value for _, value in ours])
    assert scalars_of(tmp_path / "run/tensorboard", "rewound_from") == [(13, 17.0)]


# --- recheck ----------------------------------------------------------------------------------------------------

EQUAL = (
    "Computed again, it is equal bit for bit: this step was computed right. The cause is the data, the model, or "
    "weights that were damaged before"
)
CHECK = (
    PLAIN | SPIKE | {"train__steps": 18, "spike__action": "skip", "spike__recheck": True, "train__on_nonfinite": "skip"}
)


def test_a_flipped_bit_in_a_product_is_told_from_the_data_and_names_its_rank(text: Path, tmp_path: Path) -> None:
    """Step 11 is hit on rank 1, step 17 is poisoned. The other steps do not notice that one was computed again."""
    said = succeeded(run(2, text, tmp_path, "run", env=POISON | {"FLIP": "1:11"}, **CHECK | IN_THE_NEXT_STEP))
    assert "FLIP at step 11" in said
    (hit, poisoned) = re.findall(r"^note    step (1[17])( is not finite\.|:) (Computed again.*)$", said, re.M)
    assert (hit[0], poisoned[0]) == ("11", "17")
    assert re.match(r"Computed again, it differs, so a machine computed wrong: rank 1: the sum of its losses", hit[2])
    assert "rank 0" not in hit[2]
    assert poisoned[2] == EQUAL
    (found,) = [record["spike"] for record in records(tmp_path / "run") if record.get("spike") and record["step"] == 17]
    assert found["recheck"] == EQUAL
    succeeded(
        run(
            2,
            text,
            tmp_path,
            "without",
            env=POISON | {"FLIP": "1:11"},
            **CHECK | IN_THE_NEXT_STEP | {"spike__recheck": False},
        )
    )
    assert_same_end(tmp_path / "run", tmp_path / "without", 18, every=5)


@extended
@pytest.mark.parametrize("n", [1, 2])
def test_a_step_that_is_not_finite_is_computed_again_before_the_run_stops(n: int, text: Path, tmp_path: Path) -> None:
    """A NaN of the first forward pass only: the second time it is finite. Without [spike] action."""
    keys = PLAIN | {"train__steps": 8, "spike__recheck": True, "train__micro_batch_size": 6}
    result = ranks(n, *tiny(text, tmp_path, run__name="run", **keys), fault=f"nan:{n - 1}:6:forward")
    assert result.returncode == 1
    assert f"step 6: the loss is not finite on rank {n - 1}" in result.stderr
    assert (
        f"Computed again, it differs, so a machine computed wrong: rank {n - 1}: the sum of its losses" in result.stderr
    )
    keys |= {"run__name": "always", "optim__lr": 1e30, "optim__max_norm": "inf"}
    result = ranks(n, *tiny(text, tmp_path, **keys))
    assert result.returncode == 1
    assert "not finite" in result.stderr
    assert EQUAL in result.stderr


@extended
def test_a_second_look_changes_nothing_in_float16_with_muon(text: Path, tmp_path: Path) -> None:
    more = {"fsdp__param_dtype": "float16", "grad_scaler__init_scale": 256.0, "grad_scaler__growth_interval": 4}
    more |= {
        "optim__name": "muon",
        "optim__lr": 5e-3,
        "fsdp__grad_sync": "last",
        "model__dropout": 0.1,
        **LOW,
        **IN_THE_NEXT_STEP,
    }
    said = succeeded(run(2, text, tmp_path, "run", **CHECK | more))
    assert EQUAL in said
    succeeded(run(2, text, tmp_path, "without", **CHECK | more | {"spike__recheck": False}))
    assert_same_end(tmp_path / "run", tmp_path / "without", 18, every=5)


# --- tools ------------------------------------------------------------------------------------------------------


def forget(folder: Path, copy: Path, *steps: int) -> Path:
    """A copy of a run without these checkpoints: as if it had been killed before they were saved."""
    shutil.copytree(folder, copy)
    for step in steps:
        shutil.rmtree(checkpoint(copy, step))
    return copy


def positions(folder: Path) -> list[tuple[int, int]]:
    record = read_record(folder)
    return [(record.samples(step).start, record.samples(step).stop) for step in range(1, 25)]


def test_each_step_of_a_run_that_rewound_has_its_samples(rewound: Path, text: Path, tmp_path: Path) -> None:
    expected = [(6 * i, 6 * i + 6) for i in range(12)] + [(102 + 6 * i, 108 + 6 * i) for i in range(12)]
    assert positions(rewound) == expected
    assert positions(forget(rewound, tmp_path / "killed", 18, 24)) == expected  # metrics.jsonl alone tells it
    nothing = forget(rewound, tmp_path / "nothing", 6, 12, 18, 24)
    (nothing / "metrics.jsonl").unlink()
    file = nothing / "config.toml"
    file.write_text(file.read_text().replace("skip_samples = []", "skip_samples = [[72, 102]]"))
    assert positions(nothing) == expected  # steps that are still to come


def test_which_tells_what_was_skipped(rewound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not which.main([str(rewound), "--step", "13"])
    said = capsys.readouterr().out
    assert "note    the samples 72 to 101 were skipped before step 13" in said
    assert "step 13: samples 102 to 107" in said
    assert not which.main([str(rewound), "--samples", "72", "102"])
    said = capsys.readouterr().out
    assert said.startswith("samples 72 to 101: ")
    assert {int(line.split()[3]) for line in said.splitlines() if line.startswith("step -")} == set(range(72, 102))
    assert not which.main([str(rewound), "--find", "e", "--step", "11", "--to", "14"])
    found = {int(line.split()[3]) for line in capsys.readouterr().out.splitlines() if line.startswith("step 1")}
    assert found == {*range(60, 72), *range(102, 114)}
    assert which.main([str(rewound), "--samples", "9", "9"]) == 2
    assert "--samples needs the first sample and the one after the last" in capsys.readouterr().err


@pytest.mark.parametrize("step", [14, pytest.param(24, marks=extended)])
def test_a_run_that_rewound_is_replayed(step: int, rewound: Path, text: Path) -> None:
    command = tiny(text, rewound.parent, run__name="run", **REWIND)
    said = succeeded(ranks(2, *command, f"--replay={step}", entry="tests.training.spike_worker", env=POISON))
    assert f"replay  steps {13 if step == 14 else 19} to {step}" in said
    assert ("note    rewind 1, from step 17 to 12, abandoned a step 14. The step that" in said) == (step == 14)
    assert "equal   bit for bit" in said


def test_the_report_marks_spikes_and_rewinds(rewound: Path, tmp_path: Path) -> None:
    run = read_run(rewound)
    assert marks(run) == [(13, "rewound from step 17")]
    shown = page([run])
    assert "run: 1 rewind, the last from step 17 to 12; what was abandoned is in spikes.jsonl." in shown
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


def test_a_range_that_a_run_begins_with_is_skipped() -> None:
    assert DataConfig(skip_samples=[[0, 10], [10, 20]]).position(0, 4) == 20


@pytest.mark.parametrize(
    "wrong", [[[3]], [[0, 2**63 - 1]], [[5, 5]], [[5, 3]], [[0, 4], [3, 9]], [[8, 9], [1, 2]], [[-1, 4]], [[1, 2, 3]]]
)
def test_ranges_that_are_none_are_a_mistake_in_the_config(wrong: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match=r"data\.skip_samples = .* e\.g\. \[\[800, 960\], \[2400, 2480\]\]"):
        load.load(None, {"data.skip_samples": load.ConfigValue(wrong, "command line")})


@extended
def test_ranges_hold_on_other_world_sizes_and_across_a_resume(rewound: Path, text: Path, tmp_path: Path) -> None:
    told = PLAIN | TOLD
    succeeded(run(2, text, tmp_path, "run", **told | {"train__steps": 10, "optim__schedule": "constant"}))
    succeeded(run(1, text, tmp_path, "run", **told | {"optim__schedule": "constant"}))
    succeeded(run(2, text, tmp_path, "straight", **told | {"optim__schedule": "constant"}))
    one, other = losses(tmp_path / "run"), losses(tmp_path / "straight")
    assert [value[0] for value in one.values()] == pytest.approx([value[0] for value in other.values()], rel=1e-4)
    result = run(2, text, tmp_path, "straight", **PLAIN, optim__schedule="constant")
    assert result.returncode, "the launcher's exit code"
    assert "data.skip_samples = [[72, 102]] so far, [] here" in result.stderr
