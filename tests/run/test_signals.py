"""Signals: which save and stop, which are one request, and which end the process at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import train
from tests.helpers import HANGS_S, ROOT, python, ranks, succeeded, tiny
from tests.run.test_faults import RUN, saved_steps, status, wait_for
from torchtitan_lite.run.preemption import Preemption, launcher_note

TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


def received(*signals: int, late: bool = False) -> tuple[str, list[int]]:
    """The reason of a preemption after these signals, and the exit codes of aborts. `late`: after the time limit."""
    now = 100.0
    codes: list[int] = []
    words: list[str] = []
    preemption = Preemption(1, Path("none"), clock=lambda: now, end=codes.append)
    preemption.on_abort = words.append
    now += 61.0 * late
    for number in signals:
        assert not codes
        preemption.requested()
        preemption.received(number)
    assert words == ["a second Ctrl-C: stopped without saving"] * len(codes)
    assert preemption.requested()
    return preemption.reason, codes


@pytest.mark.parametrize("signals", [
    (TERM,),
    (INT,),
    (TERM, TERM),  # by Slurm, and forwarded by torchrun
    (USR1, USR1, TERM),
    (TERM, INT),
    (INT, HUP, TERM),
])  # fmt: skip
def test_signals_are_one_request(signals: tuple[int, ...]) -> None:
    assert received(*signals) == (signal.Signals(signals[0]).name, [])


@pytest.mark.parametrize("signals", [(INT, INT), (TERM, INT, INT), (INT, TERM, INT)])
def test_a_second_ctrl_c_ends_at_once(signals: tuple[int, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert received(*signals) == (signal.Signals(signals[0]).name, [130])
    said = "train.py: a second Ctrl-C: stopped without saving; the same command resumes from the newest checkpoint\n"
    assert capfd.readouterr().err == said


def test_a_time_limit_and_a_machine_that_waits_are_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is only looked at every five seconds. torchrun's traceback is announced for signals only."""
    now = 100.0
    limited, joined = (Preemption(minutes, tmp_path / "joining", clock=lambda: now) for minutes in (1.5, 0))
    now = 190.0
    assert not limited.requested()
    now = 190.1
    assert limited.requested()
    assert limited.reason == "run.max_minutes = 1.5"
    assert not joined.requested()
    (tmp_path / "joining").touch()
    now = 195.0
    assert not joined.requested()
    now = 195.2
    assert joined.requested()
    assert joined.reason == "another machine of the job waits"
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    assert launcher_note() == ""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert launcher_note(limited.reason) == launcher_note(joined.reason) == ""
    note = "torchrun now prints a traceback of its own for the signal: it is expected, and nothing is lost"
    assert launcher_note("SIGTERM") == launcher_note() == f"\nnote    {note}"


def test_a_ctrl_c_at_the_start_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    monkeypatch.setattr("torchtitan_lite.config.cli.parse", interrupted)
    monkeypatch.setattr(train, "prepare_process", lambda: None)
    for rank, said in (("0", "train.py: stopped; the same command resumes from the newest checkpoint\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert train.main([]) == 130
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("waits", [False, True])
def test_a_signal_that_arrives_while_the_disk_is_read_is_kept(waits: bool) -> None:
    now = 100.0

    class Disk:
        def exists(self) -> bool:
            preemption.received(TERM)
            return waits

    joining: Any = Disk()
    preemption = Preemption(0, joining, clock=lambda: now)
    now += 6.0
    assert preemption.requested()
    assert preemption.reason == "SIGTERM"


@pytest.mark.parametrize("number", [TERM, INT, HUP, USR1])
def test_each_signal_is_seen_and_each_handler_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Preemption(0, Path("none")) as preemption:
        os.kill(os.getpid(), number)
        wait_until(lambda: preemption.reason == number.name)
    assert signal.getsignal(number) is before


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        with Preemption(0, Path("none")) as preemption:
            os.kill(os.getpid(), HUP)
            assert signal.getsignal(HUP) is signal.SIG_IGN
            os.kill(os.getpid(), TERM)  # which comes after it
            wait_until(preemption.requested)
            assert preemption.reason == "SIGTERM"
        assert signal.getsignal(HUP) is signal.SIG_IGN
    finally:
        signal.signal(HUP, before)


def wait_until(condition: object) -> None:
    end = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_closed_terminal_saves(text: Path, tmp_path: Path) -> None:
    """SIGHUP, as torchrun forwards it when the terminal closes or ssh drops."""
    succeeded(ranks(2, *tiny(text, tmp_path, **RUN), fault="hup:1:7:forward"))
    left = status(tmp_path / "run")
    assert (left["status"], left["step"]) in [("preempted", 7), ("preempted", 8), ("preempted", 9)]
    assert saved_steps(tmp_path / "run")[-1] == left["step"]


def test_the_exit_code_tells_a_signal_from_a_completed_run_and_a_time_limit(text: Path, tmp_path: Path) -> None:
    """On all ranks, whichever of them was asked."""
    command = tiny(text, tmp_path, **RUN, run__preempted_exit_code=75)
    said = succeeded(python("term:1:3:forward", *command, script="-m tests.run.signalled"))
    assert "codes {0: 75, 1: 75}" in said
    left = status(tmp_path / "run")
    assert (left["status"], left["reason"]) == ("preempted", "SIGTERM"), "though rank 0 was not asked"
    assert saved_steps(tmp_path / "run") == [left["step"]]
    succeeded(ranks(1, *command, "--run.max_minutes=1e-9"))
    assert status(tmp_path / "run")["status"] == "preempted"
    succeeded(ranks(1, *command))
    assert status(tmp_path / "run")["status"] == "complete"
    assert ranks(1, *command, "--train.steps=99", fault="term:0:20:forward").returncode == 75


@pytest.mark.extended
def test_a_machine_that_torchrun_lost_makes_room_for_one_of_the_same_job(text: Path, tmp_path: Path) -> None:
    """torchrun stops counting a machine that stood still for seconds, and starts the next one without it."""
    command = [sys.executable, "-u", "train.py", *tiny(text, tmp_path, **RUN | {"train__steps": 99999})]

    def started(job: str) -> subprocess.Popen[str]:
        env = os.environ | {"PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_MAX_RESTARTS": "3"}
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    first = started("mine-1")
    wait_for(first, "step ")
    stranger, _ = started("another").communicate()
    assert "is being used by process" in stranger
    second = started("mine-2")
    last, _ = first.communicate(timeout=HANGS_S)
    assert first.returncode == 1, "which torchrun starts again"
    assert "(another machine of the job waits)" in last
    left = status(tmp_path / "run")
    assert saved_steps(tmp_path / "run")[-1] == left["step"]
    wait_for(second, f"run     {tmp_path / 'run'}  resumed after step {left['step']}")
    wait_for(second, "step ")
    third, _ = started("mine-3").communicate(timeout=HANGS_S)
    assert "is being used by process" in third, "two that do not know each other do not displace each other for ever"
    second.terminate()
    said, _ = second.communicate()
    assert second.returncode == 0, said
