"""What clusters do to a run: signals, limits, lost and hanging ranks, full disks, NaN. Each fault is seen to happen."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, checkpoint, losses, python, records, succeeded, tensors, tiny, torchrun
from torchtitan_lite import storage

RUN = {"run__name": "run", "eval__every": 0, "log__every": 1, "model__dropout": 0.1}


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def faulty(fault: str, n: int, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """train.py on n ranks with a fault (tests/faults/worker.py), which must happen."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), *options]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FAULT": fault}
    command = [*launcher, "tests/faults/worker.py", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
    assert f"FAULT {fault.split(':')[0]} fired" in result.stdout, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run, on two ranks."""
    folder = tmp_path_factory.mktemp("straight")
    succeeded(torchrun(2, *tiny(text, folder, **RUN, checkpoint__every=5)))
    assert status(folder / "run")["status"] == "complete"
    return folder / "run"


def assert_same_end(run: Path, straight: Path) -> None:
    assert losses(run) == losses(straight)
    mine, theirs = tensors(checkpoint(run, 20)), tensors(checkpoint(straight, 20))
    assert all(mine[name].equal(theirs[name]) for name in theirs)


def started(*arguments: str, n: int = 2) -> subprocess.Popen[str]:
    """torchrun in the background, in a process group of its own, when the first step has been logged."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), "train.py"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*launcher, *arguments], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step"):
            return process
    raise AssertionError("it ended before its first step")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_asked_to_leave_it_saves_and_goes_on_later(number: signal.Signals, text: Path, tmp_path: Path) -> None:
    """torchrun itself ends with an error after a signal; the workers have saved and left by then."""
    long = {**RUN, "train__steps": 2000, "optim__schedule": "constant", "checkpoint__every": 0}
    process = started(*tiny(text, tmp_path, **long))
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    run = tmp_path / "run"
    left = status(run)
    assert (left["status"], left["reason"]) == ("preempted", number.name)
    assert f"left    after step {left['step']} of 2000 ({number.name}); the same command goes on" in output
    assert storage.find_steps(run / "checkpoints") == [left["step"]]
    end = left["step"] + 3
    resumed = succeeded(torchrun(2, *tiny(text, tmp_path, **{**long, "train__steps": end})))
    assert f"resumed after step {left['step']}" in resumed
    assert list(losses(run)) == list(range(1, end + 1))


@pytest.mark.slow
def test_one_rank_that_is_asked_takes_all_with_it(text: Path, tmp_path: Path) -> None:
    process = started(*tiny(text, tmp_path, **RUN, train__steps=2000))
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    workers = [pid for pid in children if "train.py" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(workers) == 2
    os.kill(int(workers[1]), signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert status(tmp_path / "run")["status"] == "preempted"
    assert "left    after step " in output


def test_a_time_limit_saves_and_leaves(text: Path, tmp_path: Path) -> None:
    output = succeeded(python(*tiny(text, tmp_path, **RUN, train__steps=100_000, run__max_minutes=0.02)))
    assert "(run.max_minutes = 0.02); the same command goes on" in output
    left = status(tmp_path / "run")
    assert storage.find_steps(tmp_path / "run/checkpoints")[-1] == left["step"]


@pytest.mark.slow
def test_a_killed_launcher_takes_its_workers_with_it(text: Path, tmp_path: Path) -> None:
    process = started(*tiny(text, tmp_path, **RUN, train__steps=100_000))
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert children
    process.kill()
    process.wait()
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < end, "a worker outlives its launcher"
        time.sleep(0.05)


def test_a_killed_rank_is_restarted_by_torchrun(straight: Path, text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, **RUN, checkpoint__every=5)
    result = faulty("kill:1:8", 2, *command, options=("--max-restarts", "2"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resumed after step 5" in result.stdout
    assert_same_end(tmp_path / "run", straight)


@pytest.mark.slow  # torchrun gives a hanging rank 30 s to leave
def test_a_rank_that_hangs_is_named_and_leaves_its_stack(text: Path, tmp_path: Path) -> None:
    result = faulty("hang:1:4", 2, *tiny(text, tmp_path, **RUN, run__timeout_minutes=0.15, checkpoint__every=2))
    assert result.returncode != 0
    assert "rank 0, step 4: lost the other ranks, or waited for 0.15 minutes" in result.stderr
    stacks = (tmp_path / "run/stacks/rank-1.txt").read_text()
    assert "worker.py" in stacks, "where it hangs"
    assert status(tmp_path / "run")["status"] == "failed"
    assert storage.find_steps(tmp_path / "run/checkpoints") == [2]


@pytest.mark.parametrize(("fault", "more"), [
    pytest.param("enospc:0:5", {}, marks=pytest.mark.slow),
    ("enospc:1:5", {"checkpoint__state_dict": "sharded", "checkpoint__async_save": True}),
    pytest.param("fsync:0:5", {"checkpoint__api": "dcp"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_save_that_fails_is_said_and_tried_again(
    fault: str, more: dict[str, Any], straight: Path, text: Path, tmp_path: Path
) -> None:
    result = faulty(fault, 2, *tiny(text, tmp_path, **RUN, checkpoint__every=5, **more))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "NOT SAVED  step 5: " in result.stdout
    assert "No space left on device; older checkpoints are untouched, training goes on" in result.stdout
    run = tmp_path / "run"
    assert storage.find_steps(run / "checkpoints")[-1] == 20
    assert 5 not in storage.find_steps(run / "checkpoints")
    assert losses(run) == losses(straight)
    for step in storage.find_steps(run / "checkpoints"):
        assert storage.verify(storage.step_folder(run / "checkpoints", step)) == []


def test_a_poisoned_step_can_be_skipped_and_is_recorded(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, **RUN, train__on_nonfinite="skip", checkpoint__every=5)
    result = faulty("nan:1:7", 2, *command)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SKIPPED step 7: not finite; run samples 36 to 41" in result.stdout
    run = tmp_path / "run"
    assert [r["skipped_samples"] for r in records(run) if "skipped_samples" in r] == [[36, 42]]
    assert storage.read_state(checkpoint(run, 20)).skipped == [7]
    steps = {name: value for name, value in tensors(checkpoint(run, 20)).items() if name.startswith("step.")}
    assert {int(value) for value in steps.values()} == {19}, "the optimizer has made one step less"


@pytest.mark.slow
def test_too_many_poisoned_steps_stop_the_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT_STEPS", "4")
    command = tiny(text, tmp_path, **RUN, train__on_nonfinite="skip", train__max_skipped=2, checkpoint__every=5)
    result = faulty("nan:0:7", 2, *command)
    assert result.returncode != 0
    assert "step 9: the loss is not finite on rank 0. The update was withheld" in result.stderr
    assert storage.find_steps(tmp_path / "run/checkpoints") == [5]


@pytest.mark.slow
def test_the_second_run_in_a_folder_is_told_who_has_it(text: Path, tmp_path: Path) -> None:
    process = started(*tiny(text, tmp_path, **RUN, train__steps=100_000), n=1)
    try:
        result = python(*tiny(text, tmp_path, **RUN))
        assert result.returncode == 2
        holder = status(tmp_path / "run")["pid"]
        assert f"run is being used by process {holder} on " in result.stderr
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    """A small part of `python -m tests.faults.soak`."""
    script = "import train; from tests.faults import soak; soak.main()"
    env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    seed = str(random.Random(3).randrange(1000))
    # the way with the most to go wrong: sharded, by DCP, beside training
    command = [sys.executable, "-c", script, "4", seed, "7"]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "'kills': 4" in result.stdout.splitlines()[-1]
