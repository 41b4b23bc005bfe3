"""Signals: which save and stop, which are one request, and which end the process at once."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import train
from tests.forkserver import free_port
from tests.helpers import ranks, succeeded, tiny, until
from tests.run.test_faults import RUN, saved_steps
from torchtitan_lite.run.attempts import newest_status
from torchtitan_lite.run.preemption import Preemption

TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


@pytest.mark.parametrize(("signals", "expected"), [
    ((TERM,), []),
    ((INT,), []),
    ((TERM, TERM), []),  # by Slurm, and forwarded by torchrun
    ((USR1, USR1, TERM), []),
    ((TERM, INT), []),
    ((INT, HUP, TERM), []),
    ((INT, INT), [130]),
    ((TERM, INT, INT), [130]),
    ((INT, TERM, INT), [130]),
])  # fmt: skip
def test_signals_are_one_request_and_a_second_ctrl_c_ends_at_once(
    signals: tuple[int, ...],
    expected: list[int],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[int] = []
    words: list[str] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    preemption = Preemption(1, Path("none"))
    preemption.on_abort = words.append
    for number in signals:
        assert not codes
        preemption.requested()
        preemption.received(number)
    assert (codes, words) == (expected, ["a second Ctrl-C: stopped without saving"] * len(expected))
    assert preemption.requested()
    assert preemption.reason == signal.Signals(signals[0]).name
    assert capfd.readouterr().err == len(expected) * (
        "train.py: a second Ctrl-C: stopped without saving; the same command resumes from the newest checkpoint\n"
    )


def test_a_time_limit_and_a_machine_that_waits_are_requests(tmp_path: Path) -> None:
    """The folder is only looked at every five seconds."""
    clock = Mock(return_value=100.0)
    limited, joined = (
        Preemption(limit, tmp_path / name, clock=clock) for limit, name in ((1.5, "none"), (0, "joining"))
    )
    for asked, now, expected in (
        (joined, 190.0, False),
        (limited, 190.0, False),
        (limited, 190.1, True),
        (joined, 195.0, False),
        (joined, 195.2, True),
    ):
        clock.return_value = now
        assert asked.requested() == expected
        (tmp_path / "joining").touch()
    assert [limited.reason, joined.reason] == ["run.max_minutes = 1.5", "another machine of the job waits"]


def test_a_ctrl_c_at_the_start_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    monkeypatch.setattr("torchtitan_lite.config.cli.parse", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(train, "prepare_process", lambda: None)
    for rank, said in (("0", "train.py: stopped\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert train.main([]) == 130
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("number", [TERM, INT, HUP, USR1])
def test_each_signal_is_seen_and_each_handler_restored(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    before, codes = signal.getsignal(number), list[int]()
    monkeypatch.setattr(os, "_exit", codes.append)
    with Preemption(0, Path("none")) as preemption:
        os.kill(os.getpid(), number)
        until(lambda: preemption.reason == number.name, number.name)
        os.kill(os.getpid(), INT)
        os.kill(os.getpid(), INT)
        until(lambda: codes, "a second Ctrl-C", 60)
    assert signal.getsignal(number) is before


def _waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _computes() -> None:
    while True:
        pass


@pytest.mark.parametrize("wait", [_waits_for_a_lock, lambda: os.read(os.pipe()[0], 1), _computes])
def test_a_second_ctrl_c_ends_a_process_wherever_python_is(wait: Callable[[], Any]) -> None:
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.dup2(writing, 2)
        with Preemption(0, Path("none")):
            os.write(2, b"waits\n")
            wait()
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 6) == b"waits\n"

    def interrupted() -> Any:
        os.kill(child, INT)
        ended, status = os.waitpid(child, os.WNOHANG)
        return ended and [os.waitstatus_to_exitcode(status)]

    assert until(interrupted, "its end") == [130]
    with os.fdopen(reading) as said:
        assert said.read().startswith("train.py: a second Ctrl-C: stopped without saving; the same command resumes")


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        with Preemption(0, Path("none")) as preemption:
            os.kill(os.getpid(), HUP)
            assert signal.getsignal(HUP) is signal.SIG_IGN
            os.kill(os.getpid(), TERM)  # which comes after it
            until(preemption.requested, "SIGTERM")
            assert preemption.reason == "SIGTERM"
        assert signal.getsignal(HUP) is signal.SIG_IGN
    finally:
        signal.signal(HUP, before)


def test_the_exit_code_tells_a_signal_from_a_completed_run_and_a_time_limit(text: Path, tmp_path: Path) -> None:
    """On all ranks, whichever of them was asked."""
    command, run = tiny(text, tmp_path, **RUN, run__preempted_exit_code=75), tmp_path / "run"
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

    def code_of(rank: int) -> int:
        env = there | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return ranks(1, *command, fault="term:1:3:forward" * rank, env=env).returncode

    with ThreadPoolExecutor(2) as both:
        assert list(both.map(code_of, (0, 1))) == [75, 75]
    left = newest_status(run)
    assert (left["status"], left["reason"]) == ("preempted", "SIGTERM"), "though rank 0 was not asked"
    assert saved_steps(run) == [left["step"]]
    succeeded(ranks(1, *command, "--run.max_minutes=1e-9"))
    assert newest_status(run)["status"] == "preempted"
    succeeded(ranks(1, *command))
    assert newest_status(run)["status"] == "complete"
    assert ranks(1, *command, "--train.steps=99", fault="term:0:20:forward").returncode == 75
