"""Faults of a cluster: signals, time limits, lost and hanging ranks, full disks, NaN. Tests check that they fired."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import (
    HANGS_S,
    ROOT,
    assert_same_end,
    checkpoint,
    losses,
    python,
    ranks,
    records,
    succeeded,
    tensors,
    tiny,
)
from torchtitan_lite.checkpointing import storage

LAST = 12  # steps
RUN = {
    **{"run__name": "run", "train__steps": LAST, "eval__every": 0, "log__every": 1, "model__dropout": 0.1},
    "checkpoint__every": 5,
}
SHARDED = {"checkpoint__state_dict": "sharded"}
slow = pytest.mark.slow


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def saved_steps(run: Path) -> list[int]:
    """The steps of a run's checkpoints, all of which must be complete."""
    steps = storage.find_steps(run / "checkpoints")
    for step in steps:
        assert storage.verify(checkpoint(run, step)) == []
    return steps


def launched(
    *arguments: str, script: str = "train.py", restarts: int = 0, env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """torchrun of two ranks in the background, in its own session."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*launcher, "--max-restarts", str(restarts), script, *arguments],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | (env or {}),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"it ended without {beginning}")


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run, on two ranks."""
    folder = tmp_path_factory.mktemp("straight")
    succeeded(ranks(2, *tiny(text, folder, **RUN)))
    assert status(folder / "run")["status"] == "complete"
    return folder / "run"


def resumes_to_the_same_end(command: list[str], run: Path, straight: Path) -> str:
    """Start the run again: its end must equal the undisturbed run, bit for bit."""
    output = succeeded(ranks(2, *command))
    ends_as(run, straight)
    return output


def ends_as(run: Path, straight: Path, last: int = LAST) -> None:
    assert last in saved_steps(run)
    assert_same_end(run, straight, last)


# --- asked to leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.extended
def test_a_preempted_run_saves_and_resumes(number: signal.Signals, text: Path, tmp_path: Path) -> None:
    """torchrun then exits with an error, and prints a traceback that a line of ours announces."""
    long = {**RUN, "train__steps": 2000, "optim__schedule": "constant", "checkpoint__every": 0}
    process = launched(*tiny(text, tmp_path, **long))
    wait_for(process, "step")
    process.send_signal(number)
    output, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode != 0
    run = tmp_path / "run"
    left = status(run)
    assert (left["status"], left["reason"]) == ("preempted", number.name)
    stopped = f"stopped after step {left['step']} of 2000 ({number.name}); the same command resumes"
    announced = "note    torchrun now prints a traceback"
    assert output.index(stopped) < output.index(announced) < output.index("Traceback")
    assert saved_steps(run) == [left["step"]]
    end = left["step"] + 3
    resumed = succeeded(ranks(2, *tiny(text, tmp_path, **{**long, "train__steps": end})))
    assert f"resumed after step {left['step']}" in resumed
    assert list(losses(run)) == list(range(1, end + 1))


@pytest.mark.parametrize(("moment", "more"), [
    pytest.param("0:5:write", {}, marks=pytest.mark.extended),
    pytest.param("1:7:forward", {"eval__every": 3}, marks=pytest.mark.extended),
    pytest.param("1:1:batch", {}, marks=slow),
    pytest.param("0:6:eval", {"eval__every": 3}, marks=slow),
    pytest.param("1:5:sync", SHARDED, marks=slow),
    pytest.param("0:10:commit", {"checkpoint__async_save": True, **SHARDED}, marks=slow),
    pytest.param(f"0:{LAST}:after rename", {}, marks=slow),
])  # fmt: skip
def test_a_signal_at_any_moment_leaves_one_checkpoint_at_the_end_of_a_step(
    moment: str, more: dict[str, Any], straight: Path, text: Path, tmp_path: Path
) -> None:
    command = tiny(text, tmp_path, **{**RUN, **more})
    output = succeeded(ranks(2, *command, fault=f"term:{moment}"))
    run = tmp_path / "run"
    left = status(run)
    fired = re.search(r"FAULT term fired on rank \d at step (\d+)", output)
    assert fired, output
    last = int(fired[1])  # later than the moment says, in a thread
    if last < LAST:
        assert left["status"] == "preempted"
        assert last <= left["step"] <= last + 2, "it left at once"
    assert saved_steps(run)[-1] == left["step"]
    resumes_to_the_same_end(command, run, straight)


def test_a_time_limit_saves_and_exits(text: Path, tmp_path: Path) -> None:
    output = succeeded(ranks(1, *tiny(text, tmp_path, **{**RUN, "train__steps": 100_000, "run__max_minutes": 0.02})))
    assert "(run.max_minutes = 0.02); the same command resumes" in output
    left = status(tmp_path / "run")
    assert saved_steps(tmp_path / "run")[-1] == left["step"]


# --- killed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [
    "kill:0:10:before rename",
    pytest.param("kill:0:10:begin", marks=slow),
    pytest.param("kill:0:10:write", marks=slow),
    pytest.param("kill:1:10:write", marks=slow),
    pytest.param("kill:1:10:sync", marks=slow),
    pytest.param("kill:0:10:manifest", marks=slow),
    pytest.param("kill:0:10:after rename", marks=slow),
    pytest.param("kill:0:10:purge", marks=slow),
    pytest.param("halve:0:10:delete", marks=pytest.mark.extended),
    pytest.param("term:0:7:batch,kill:0:7:sync", marks=slow),  # within the save of a preemption
])  # fmt: skip
def test_a_kill_at_any_moment_of_a_save_loses_no_committed_checkpoint(
    fault: str, straight: Path, text: Path, tmp_path: Path
) -> None:
    command = tiny(text, tmp_path, **RUN, **SHARDED, **{"checkpoint__keep_latest": 1})
    result = ranks(2, *command, fault=fault)
    assert result.returncode != 0
    run = tmp_path / "run"
    committed = fault.split(":")[-1] in ("after rename", "purge", "delete")
    newest = 10 if committed else 5
    assert saved_steps(run)[-1] == newest
    assert f"resumed after step {newest}" in resumes_to_the_same_end(command, run, straight)
    assert not list((run / "checkpoints").glob(".*")), "what the killed one left went away"


@slow
def test_20_kills_in_a_row_are_20_restarts(text: Path, tmp_path: Path) -> None:
    """Each kill hits a different rank at a different step."""
    more = {**RUN, "train__steps": 22, "checkpoint__every": 1}
    succeeded(ranks(2, *tiny(text, tmp_path, **{**more, "run__name": "straight"})))
    command = tiny(text, tmp_path, **more)
    faults = {"FAULT": "rotate:0:1", "FAULT_TIMES": "20"}
    process = launched(*command, script="tests/faults/worker.py", restarts=20, env=faults)
    output, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == 0, output[-3000:]
    assert output.count("FAULT rotate fired") == 20
    ends_as(tmp_path / "run", tmp_path / "straight", last=22)


@pytest.mark.extended  # the kills at each moment of a save are in `make test`
def test_kills_at_random_moments_lose_nothing() -> None:
    """A small part of `python -m tests.faults.soak`."""
    seed = str(random.Random(3).randrange(1000))
    # the way with the most to go wrong: sharded, by DCP, beside training
    said = succeeded(python("3", seed, "7", script="-m tests.faults.soak"))
    assert "'kills': 3" in said.splitlines()[-1]


# --- ranks that are lost, hang, or differ -----------------------------------------------------------------------


@pytest.mark.extended
def test_a_rank_that_pauses_changes_nothing(
    straight: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_SECONDS", "2")
    succeeded(ranks(2, *tiny(text, tmp_path, **RUN), fault="stop:1:4:batch"))
    ends_as(tmp_path / "run", straight)


@pytest.mark.parametrize("site", ["forward", "batch"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.extended
def test_a_stopped_rank_is_named_with_its_silence(
    rank: int, site: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo's error ends the others, or their watchdog if the rank was behind. Rank 0 has the store here."""
    monkeypatch.setenv("FAULT_SECONDS", "600")
    result = ranks(2, *tiny(text, tmp_path, **RUN, run__timeout_minutes=0.15), fault=f"stop:{rank}:4:{site}")
    assert result.returncode != 0
    left = status(tmp_path / "run")
    assert left["status"] == "failed"
    assert left["reason"] in result.stderr
    expected = (
        rf"rank {1 - rank}, step 4: waited for the other ranks for .*; rank {rank} silent for [6-9] s \(its process is "
        r"stopped, or its machine does not answer; last seen: (step 4, .*|unknown)\)\. "
        r"Stacks of .*; a process that is stopped or was killed writes none\."
    )
    assert re.match(expected, left["reason"]), left["reason"]


@pytest.mark.parametrize(("action", "said"), [
    pytest.param("exit", "", marks=slow),
    ("raise", "ZeroDivisionError: a bug in somebody's loader"),
    ("kill", ""),
])  # fmt: skip
def test_a_rank_that_ends_ends_the_others_which_name_it(
    action: str, said: str, straight: Path, text: Path, tmp_path: Path
) -> None:
    command = tiny(text, tmp_path, **{**RUN, "checkpoint__every": 2})
    result = ranks(3, *command, fault=f"{action}:1:4:batch")
    assert result.returncode != 0
    assert said in result.stderr
    assert saved_steps(tmp_path / "run") == [2]
    died = ", step 4: connection reset: a process died: rank 1 (last seen: step 4, fetching its batch). "
    assert status(tmp_path / "run")["reason"].partition(died)[0] in ("rank 0", "rank 2")


@pytest.mark.extended
def test_only_the_rank_that_died_first_is_named(text: Path, tmp_path: Path) -> None:
    """With gloo a rank loses its neighbours in the ring, so ranks end one after the other."""
    command = tiny(text, tmp_path, **RUN, speed__shared_memory=False)
    stderr = ranks(5, *command, fault="kill:2:4:batch").stderr
    assert set(re.findall(r"a process died: (.*?)\. If", stderr)) == {
        "rank 2 (last seen: step 4, fetching its batch)"
    }, stderr


@pytest.mark.extended
def test_torchrun_ends_with_the_cause_and_names_the_killed_rank(text: Path, tmp_path: Path) -> None:
    process = launched(*tiny(text, tmp_path, **RUN), script="tests/faults/worker.py", env={"FAULT": "kill:1:4:batch"})
    output, _ = process.communicate(timeout=HANGS_S)
    others, cause = output.partition("Failures:")[2].split("Root Cause (first observed failure):")
    assert "rank      : 1 (local_rank: 1)" in cause
    assert "exitcode  : -9" in cause
    assert "traceback : train.py: rank 0, step 4: connection reset: a process died: rank 1 " in others


@pytest.mark.extended
def test_copies_that_differ_are_not_saved(text: Path, tmp_path: Path) -> None:
    """HSDP: a bit flips in the memory of one rank."""
    command = tiny(text, tmp_path, **RUN, fsdp__dp_replicate=2)
    result = ranks(4, *command, fault="flip:3:7")
    assert result.returncode != 0
    assert "step 10: copies of the model differ: rank 3 against the first copy" in result.stderr.replace(
        "rank 2, 3", "rank 3"
    )
    assert "output.weight" in result.stderr
    assert saved_steps(tmp_path / "run") == [5]


# --- disks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "more"), [
    ("error:1:5:write:2", {**SHARDED, "checkpoint__async_save": True}),
    pytest.param("error:0:5:write:2", {}, marks=slow),
    pytest.param("error:0:5:write:2", {"checkpoint__async_save": True}, marks=slow),
    pytest.param("error:0:5:sync:2", {"checkpoint__api": "dcp"}, marks=slow),
    pytest.param("error:1:5:sync:2", {**SHARDED, "checkpoint__api": "dcp"}, marks=slow),
    pytest.param("error:0:5:begin:2", SHARDED, marks=slow),
    pytest.param("error:0:5:manifest:2", {}, marks=pytest.mark.extended),
    pytest.param("error:0:5:before rename:2", {}, marks=slow),
])  # fmt: skip
@pytest.mark.extended
def test_a_failed_save_is_reported_and_retried(
    fault: str, more: dict[str, Any], straight: Path, text: Path, tmp_path: Path
) -> None:
    output = succeeded(ranks(2, *tiny(text, tmp_path, **RUN, **more), fault=fault))
    assert "NOT SAVED  step 5: " in output
    assert "No space left on device; older checkpoints are untouched, training continues" in output
    run = tmp_path / "run"
    assert 5 not in saved_steps(run)
    assert not list((run / "checkpoints").glob(".*")), "nothing is left of it"
    ends_as(run, straight)


@pytest.mark.extended
def test_a_folder_that_vanishes_is_not_replaced(
    straight: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a mount disappears, nothing may be written to the mount point."""
    run = tmp_path / "run"
    monkeypatch.setenv("FAULT_FOLDER", str(run))
    command = tiny(text, tmp_path, **RUN)
    result = ranks(2, *command, fault="vanish:0:7")
    assert result.returncode == 1
    assert "NOT SAVED  step 10: " in result.stdout
    assert "Traceback" not in result.stderr
    assert f"step    {LAST}/{LAST}" in result.stdout
    assert "the last checkpoint was not saved: " in result.stderr
    assert not run.exists()
    (tmp_path / "gone").rename(run)
    assert "resumed after step 5" in resumes_to_the_same_end(command, run, straight)


@pytest.mark.extended
def test_background_saves_wait_for_each_other(
    straight: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_SECONDS", "0.05")
    command = tiny(text, tmp_path, **{**RUN, **SHARDED, "checkpoint__every": 1, "checkpoint__async_save": True})
    output = succeeded(ranks(2, *command, fault="slow:0:1:sync:40"))
    steps = [int(line.split("step-")[1].split()[0]) for line in output.splitlines() if line.startswith("saved")]
    assert steps == list(range(1, LAST + 1)) == saved_steps(tmp_path / "run")
    ends_as(tmp_path / "run", straight)


# --- numbers ----------------------------------------------------------------------------------------------------


def test_a_poisoned_step_can_be_skipped_and_is_recorded_with_its_samples(text: Path, tmp_path: Path) -> None:
    """Step 7 has the size of the second entry of the schedule; the step after it begins behind its samples."""
    keys = {"train__on_nonfinite": "skip", "train__batch_schedule": "[[4,4],[6,8]]", "checkpoint__every": 7}
    said = succeeded(ranks(2, *tiny(text, tmp_path, **RUN | keys | {"train__steps": 8}), fault="nan:1:7:forward"))
    assert "SKIPPED step 7: not finite; run samples 32 to 39" in said
    run = tmp_path / "run"
    assert [r["skipped_samples"] for r in records(run) if "skipped_samples" in r] == [[32, 40]]
    states = [storage.read_state(checkpoint(run, step)) for step in (7, 8)]
    assert [(state.samples_consumed, state.skipped) for state in states] == [(40, [7]), (48, [7])]
    steps = {name: value for name, value in tensors(checkpoint(run, 8)).items() if name.startswith("step.")}
    assert {int(value) for value in steps.values()} == {7}, "the optimizer has made one step less"


@pytest.mark.extended
def test_steps_skipped_before_a_resume_count_towards_max_skipped(text: Path, tmp_path: Path) -> None:
    """Steps 9 and 10 are skipped, 10 is saved, and with max_skipped = 3 the second of the next ones is too many."""
    one_forward = {"train__micro_batch_size": 6}
    command = tiny(text, tmp_path, **RUN, **one_forward, train__on_nonfinite="skip", train__max_skipped=3)
    succeeded(ranks(1, *command, "--train.steps=10", fault="nan:0:9:forward:2"))
    assert storage.read_state(checkpoint(tmp_path / "run", 10)).skipped == [9, 10]
    result = ranks(1, *command, fault="nan:0:11:forward:9")
    assert result.returncode == 1
    assert "step 12: the loss is not finite on rank 0. The update was withheld" in result.stderr
    skipped = [r["step"] for r in records(tmp_path / "run") if "skipped_samples" in r]
    assert skipped == [9, 10, 11]


# --- the rest ---------------------------------------------------------------------------------------------------


@slow
def test_50_runs_that_finish_exit_with_0(text: Path, tmp_path: Path) -> None:
    """On twice as many ranks as cores, with threads of gloo and of a background save to shut down."""
    more = {"train__steps": 2, "optim__warmup_steps": 1, "checkpoint__async_save": True, **SHARDED}
    for number in range(50):
        succeeded(ranks(4, *tiny(text, tmp_path, **{**RUN, **more, "run__name": f"run{number}"})))


@pytest.mark.extended
def test_any_path_and_locale_works(straight: Path, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("a b\u00fc" + "x" * 150)
    folder.mkdir()
    before = os.umask(0o077)
    try:
        env = {"LC_ALL": "C", "TZ": "Pacific/Apia", "PYTHONUTF8": "0"}
        succeeded(ranks(2, *tiny(text, folder, **RUN), env=env))
    finally:
        os.umask(before)
    assert_same_end(folder / "run", straight)
