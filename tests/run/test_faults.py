"""Faults of a cluster: signals, time limits, lost and hanging ranks, full disks, NaN. Tests check that they fired."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import assert_same_end, checkpoint, python, ranks, records, run_of, succeeded, tensors, tiny
from torchtitan_lite.checkpointing import before_save, storage
from torchtitan_lite.run.attempts import newest_status

LAST = 12  # steps
RUN = {
    **{"run__name": "run", "train__steps": LAST, "eval__every": 0, "log__every": 1, "model__dropout": 0.1},
    "checkpoint__every": 5,
}
SHARDED = {"checkpoint__state_dict": "sharded"}
slow, extended = pytest.mark.slow, pytest.mark.extended
Start = Callable[..., str]


def saved_steps(run: Path) -> list[int]:
    """The steps of a run's checkpoints, all of which must be complete."""
    steps = storage.find_steps(run / "checkpoints")
    for step in steps:
        assert storage.verify(checkpoint(run, step)) == []
    return steps


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run, on two ranks."""
    return run_of(2, text, tmp_path_factory.mktemp("straight"), **RUN)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def start(text: Path, run: Path) -> Start:
    """The output of the run with a fault and other options, which may have to fail."""

    def started(fault: str = "", *, n: int = 2, fails: bool = False, env: Any = None, **more: Any) -> str:
        result = ranks(n, *tiny(text, run.parent, **RUN | more), fault=fault, env=env)
        output = result.stdout + result.stderr
        assert bool(result.returncode) == fails, output
        return output

    return started


def ends_as(run: Path, straight: Path, last: int = LAST) -> None:
    assert last in saved_steps(run)
    assert_same_end(run, straight, last)


# --- asked to leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moment", "more"), [
    ("0:5:write", {"sample__every": 5, "sample__max_tokens": 2}),
    pytest.param("1:7:forward", {"eval__every": 3}, marks=extended),
    pytest.param("1:1:batch", {}, marks=slow),
    pytest.param("0:6:eval", {"eval__every": 3}, marks=slow),
    pytest.param("1:5:sync", SHARDED, marks=slow),
    pytest.param("0:10:commit", {"checkpoint__async_save": True, **SHARDED}, marks=slow),
    pytest.param(f"0:{LAST}:after rename", {}, marks=slow),
])  # fmt: skip
def test_a_signal_at_any_moment_leaves_one_checkpoint_at_the_end_of_a_step(
    moment: str, more: dict[str, Any], start: Start, run: Path, straight: Path
) -> None:
    output = start(f"term:{moment}", **more)
    left = newest_status(run)
    fired = re.search(r"FAULT term fired on rank \d at step (\d+)", output)
    assert fired, output
    last = int(fired[1])  # later than the moment says, in a thread
    if last < LAST:
        assert left["status"] == "preempted"
        assert last <= left["step"] <= last + 2, "it left at once"
    assert left["step"] == 5 or moment not in ("0:5:write", "1:5:sync"), "within a save, which is then the only one"
    assert saved_steps(run)[-1] == left["step"]
    start(**more)
    ends_as(run, straight)


# --- killed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [
    "kill:0:10:before rename",
    pytest.param("kill:0:10:begin", marks=slow),
    pytest.param("kill:0:10:write", marks=slow),
    pytest.param("kill:1:10:write", marks=slow),
    pytest.param("kill:1:10:sync", marks=slow),
    pytest.param("kill:0:10:manifest", marks=slow),
    pytest.param("kill:0:10:after rename", marks=slow),
    pytest.param("halve:0:10:delete", marks=extended),
    pytest.param("term:0:7:batch,kill:0:7:sync", marks=slow),  # within the save of a preemption
])  # fmt: skip
def test_a_kill_at_any_moment_of_a_save_loses_no_committed_checkpoint(
    fault: str, start: Start, run: Path, straight: Path
) -> None:
    keys = {**SHARDED, "checkpoint__keep_latest": 1}
    start(fault, fails=True, **keys)
    committed = fault.split(":")[-1] in ("after rename", "delete")
    newest = 10 if committed else 5
    assert saved_steps(run)[-1] == newest
    assert f"resumed after step {newest}" in start(**keys)
    ends_as(run, straight)
    assert not list((run / "checkpoints").glob(".*")), "what the killed one left went away"


@extended  # the kills at each moment of a save are in `make test`
def test_kills_at_random_moments_lose_nothing() -> None:
    """A small part of `python -m tests.faults.soak`."""
    # 7: the way with the most to go wrong, sharded, by DCP, beside training
    said = succeeded(python("3", "243", "7", script="-m tests.faults.soak"))
    assert "'kills': 3" in said
    assert " runs ended with other losses or tensors" in said.splitlines()[-1]


# --- ranks that are lost, stop, or differ -----------------------------------------------------------------------


@pytest.mark.parametrize(("action", "said", "others"), [
    pytest.param("exit", "", "", marks=slow),
    ("raise", "ZeroDivisionError: a bug in somebody's loader", ""),
    ("kill", "", ""),
    # they wait where no error arrives, as in a kernel of NCCL
    ("raise", "train.py: a process died: rank 1 (last seen", ",hang:0:4:batch,hang:2:4:batch"),
    pytest.param("kill", "train.py: a process died: rank 1", ",hang:0:4:batch,hang:2:4:batch", marks=slow),
])  # fmt: skip
def test_a_rank_that_ends_ends_the_others_which_name_it(
    action: str, said: str, others: str, start: Start, run: Path
) -> None:
    assert said in start(
        f"{action}:1:4:batch{others}",
        n=3,
        fails=True,
        env={"TORCHTITAN_LITE_FAILED": f"{run}-nodes", "SLURMD_NODENAME": "node7"},
        checkpoint__every=2,
    )
    assert {*Path(f"{run}-nodes").read_text().splitlines()} == {"node7"}
    assert saved_steps(run) == [2]
    died = "a process died: rank 1 (last seen: step 4, fetching its batch). If that process printed no error, "
    about = newest_status(run)
    reset = () if others else [f"rank {rank}, step 4: connection reset: " for rank in (0, 2)]
    assert (about["status"], about["reason"].partition(died)[0] in (reset or [""])) == ("failed", True)
    shown = python(str(run), script="-m torchtitan_lite.status")
    assert ("a process died: rank 1" in shown.stdout, shown.returncode) == (True, 1)


@extended
def test_copies_that_differ_are_not_saved(start: Start, run: Path) -> None:
    """HSDP: a bit flips in the memory of one rank."""
    output = start("flip:3:7", n=4, fails=True, fsdp__dp_replicate=2)
    assert re.search(
        r"step 10: replicas of the model differ: rank (2 \(\S+\), )?3 \(\S+\) from the first replica", output
    )
    assert "output.weight" in output
    assert saved_steps(run) == [5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_digest_tells_every_flipped_bit_and_every_exchange(dtype: torch.dtype, monkeypatch: Any) -> None:
    """Tensors of an odd and an even length, which begin at an odd and an even element, in several pieces."""
    monkeypatch.setattr(before_save, "CHUNK_ELEMENTS", 8)
    store = (torch.arange(3, 43) * torch.tensor([1, -1]).repeat(20)).to(dtype)
    for values in (store[1:21], store[:21], store[2:9].view(7, 1), store[5:6]):
        mine = int(before_save.digest(values))
        assert mine == int(before_save.digest(values.clone()))
        words = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]).view(-1)
        for place in range(len(words)):
            for bit in range(8 * values.element_size()):
                before = words[place].clone()
                words[place] ^= (1 << bit) - (2 << bit if bit == 8 * values.element_size() - 1 else 0)
                assert int(before_save.digest(values)) != mine, (place, bit)
                words[place] = before
        for one, other in itertools.combinations(range(len(words)), 2):
            changed = values.clone().view(-1)
            changed[one], changed[other] = values.view(-1)[other], values.view(-1)[one]
            assert int(before_save.digest(changed)) != mine, (one, other)
            changed = -values.view(-1) * ((torch.arange(len(words)) == one) | (torch.arange(len(words)) == other))
            changed = torch.where(changed == 0, values.view(-1), changed)
            assert int(before_save.digest(changed)) != mine, (one, other)


# --- disks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "more"), [
    ("error:1:5:write:2", {**SHARDED, "checkpoint__async_save": True, "checkpoint__api": "dcp"}),
    pytest.param("error:0:5:write:2", {}, marks=slow),
    pytest.param("error:0:5:write:2", {"checkpoint__async_save": True}, marks=slow),
    pytest.param("error:0:5:sync:2", {"checkpoint__api": "dcp"}, marks=slow),
    pytest.param("error:1:5:sync:2", {**SHARDED, "checkpoint__api": "dcp"}, marks=slow),
    pytest.param("error:0:5:begin:2", SHARDED, marks=slow),
    pytest.param("error:0:5:manifest:2", {}, marks=extended),
    pytest.param("error:0:5:before rename:2", {}, marks=slow),
])  # fmt: skip
def test_a_failed_save_is_reported_and_retried(
    fault: str, more: dict[str, Any], start: Start, run: Path, straight: Path
) -> None:
    output = start(fault, **more)
    assert "NOT SAVED  step 5: " in output
    assert "No space left on device; older checkpoints are untouched, training continues" in output
    assert 5 not in saved_steps(run)
    assert not list((run / "checkpoints").glob(".*")), "nothing is left of it"
    ends_as(run, straight)


@extended
def test_a_folder_that_vanishes_is_not_replaced(start: Start, run: Path, straight: Path, tmp_path: Path) -> None:
    """After a mount disappears, nothing may be written to the mount point."""
    output = start("vanish:0:7", fails=True, env={"FAULT_FOLDER": str(run)})
    assert "NOT SAVED  step 10: " in output
    assert "Traceback" not in output
    assert f"step    {LAST}/{LAST}" in output
    assert "the last checkpoint was not saved: " in output
    assert not run.exists()
    (tmp_path / "gone").rename(run)
    assert "resumed after step 5" in start()
    ends_as(run, straight)


# --- numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=extended)])
def test_a_poisoned_step_can_be_skipped_and_is_recorded_with_its_samples(
    optimizer: str, start: Start, run: Path
) -> None:
    """Step 7 has the size of the second entry of the schedule; the step after it begins behind its samples."""
    keys = {"train__on_nonfinite": "skip", "train__batch_schedule": "[[4,4],[6,8]]", "checkpoint__every": 1}
    said = start(
        "nan:1:7:forward", **keys, train__steps=8, optim__name=optimizer, log__every=8
    )  # which is for the save
    assert "SKIPPED step 7: not finite; run samples 32 to 39" in said
    assert [r["skipped_samples"] for r in records(run) if "skipped_samples" in r] == [[32, 40]]
    assert [3 < r["mean_loss"] < 7 for r in records(run) if "loss" in r] == [True], "of the other steps"
    states = [storage.read_state(checkpoint(run, step)) for step in (7, 8)]
    assert [(state.samples_consumed, state.skipped) for state in states] == [(40, [7]), (48, [7])]
    before, at, after = (tensors(checkpoint(run, step)) for step in (6, 7, 8))
    assert not [name for name in before if not at[name].equal(before[name])], "a NaN reached it, or a count of steps"
    assert not [name for name in before if name.endswith("weight") and at[name].equal(after[name])]


def test_steps_skipped_before_a_resume_count_towards_max_skipped(start: Start, run: Path) -> None:
    """Steps 9 and 10 are skipped, 10 is saved, and with max_skipped = 3 the second of the next ones is too many."""
    keys = {"n": 1, "train__micro_batch_size": 6, "train__on_nonfinite": "skip", "train__max_skipped": 3}
    start("nan:0:9:forward:2", **keys, train__steps=10)
    assert storage.read_state(checkpoint(run, 10)).skipped == [9, 10]
    output = start("nan:0:11:forward:9", fails=True, **keys)
    assert "step 12: the loss is not finite on rank 0. The update was withheld" in output
    assert [r["step"] for r in records(run) if "skipped_samples" in r] == [9, 10, 11]
