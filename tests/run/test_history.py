"""The history of a run: attempts.jsonl, which records count, whatever a kill has left, and goodput."""

import os
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests.helpers import ranks, records, succeeded, tiny, until
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import BusyError
from torchtitan_lite.run import attempts, run_folder

STARTED: dict[str, Any] = {
    **{"step": 3, "samples": 24, "command": ["train.py"], "config": {"train.steps": 9}, "tasks": {}},
    **{"setting": {}, "world_size": 2, "hosts": ["a"], "versions": {}, "git": {}, "device": "cpu"},
    "of a later version": 1,
}


def begin(folder: Path, number: int, step: int) -> None:
    attempts.add(folder, {"attempt": number, "time": 1.0} | STARTED | {"step": step, "samples": 8 * step})


@pytest.mark.parametrize("left", [b'{"attempt": 2, "ti', b"{", b"\0" * 9, b"\xff", b'{"attempt": 1, "ended": "'])
def test_a_torn_last_line_is_ignored_and_the_next_line_is_its_own(left: bytes, tmp_path: Path) -> None:
    """A kill or a full disk can cut a line anywhere."""
    begin(tmp_path, 1, 0)
    with (tmp_path / attempts.FILE).open("ab") as file:
        file.write(left)
    assert [attempt.attempt for attempt in attempts.read(tmp_path)] == [1]
    begin(tmp_path, 2, 4)
    assert [(attempt.attempt, attempt.step) for attempt in attempts.read(tmp_path)] == [(1, 0), (2, 4)]
    # 3 s of the 12 since the launch at 1.0
    assert attempts.goodput(
        attempts.read(tmp_path),
        [
            *({"loss": 4.0, "seconds": seconds, "time": 9.0 + seconds} for seconds in (2.0, 1.0)),
            {"val_loss": 4.0, "time": 13.0},
        ],
    ) == (0.25, 12.0)


def test_only_a_rank_that_knows_of_no_end_records_a_failure(tmp_path: Path) -> None:
    first, second = (Process(rank, 2, torch.device("cpu"), 1) for rank in (0, 1))
    assert [run_folder.record_start(tmp_path, STARTED) for _ in range(2)] == [1, 2]
    about = attempts.newest_status(tmp_path)
    assert [about[key] for key in ("attempt", "status", "step", "reason", "repeats")] == [2, "running", 3, "", False]
    run_folder.record_end(tmp_path, first, 0, "failed", 4, "refused")
    run_folder.record_end(tmp_path, second, 2, "preempted", 4, "rank 0 records it")
    run_folder.record_end(tmp_path, second, 1, "failed", 4, "of an earlier attempt")
    assert attempts.newest_status(tmp_path) == about
    run_folder.record_end(tmp_path, second, 2, "failed", 4, "rank 0 died", repeats=True)
    run_folder.record_end(tmp_path, second, 2, "failed", 5, "the next rank")
    about = attempts.newest_status(tmp_path)
    assert [about[key] for key in ("status", "step", "reason", "repeats")] == ["failed", 4, "rank 0 died", True]
    assert [attempt.reason for attempt in attempts.read(tmp_path)] == ["", "rank 0 died"]
    run_folder.record_end(tmp_path, first, 2, "complete", 9)
    assert [(attempt.ended, attempt.last_step, attempt.reason) for attempt in attempts.read(tmp_path)] == [
        *(("", 0, ""), ("complete", 9, "")),
    ]


def test_a_machine_of_the_same_job_is_asked_to_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one of another job, not without restarts, and not twice within five minutes."""
    (tmp_path / ".lock-holder").write_text("process 7 on node3, job mine")
    used = f"{tmp_path} is being used by process 7 on node3, job mine"
    joins, stops = run_folder.JOINS, "SIGTERM"
    for number, (reason, at) in enumerate([(joins, 700.0), (joins, 900.0), (stops, 1190.0), (joins, 800.0)]):
        begin(tmp_path, number, 0)
        attempts.add(tmp_path, {"attempt": number, "ended": "preempted", "reason": reason, "end_time": at})
    with FileLock(tmp_path / ".lock") as held:
        for job, restarts, now in (("other-2", "3", 1201.0), ("mine-2", "0", 1201.0), ("mine-2", "3", 1199.0)):
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
            monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
            monkeypatch.setattr("time.time", lambda now=now: now)
            with pytest.raises(BusyError, match=f"^{used}; wait for it, or choose another --run.name=NAME$"):
                run_folder.lock(tmp_path)
        monkeypatch.setattr("time.time", lambda: 1201.0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(lambda: run_folder.lock(tmp_path).release())  # a lock is of its thread
            until((tmp_path / run_folder.JOINING).exists, "it asks")
            held.release()
            waiting.result()
        assert capsys.readouterr().out == f"note    {used}, which is asked to save and start again with this one\n"
        assert not (tmp_path / run_folder.JOINING).exists()
        assert (tmp_path / ".lock-holder").read_text() == (f"process {os.getpid()} on {socket.gethostname()}, job mine")


def test_the_state_of_the_code_is_its_commit_and_whether_it_differs(tmp_path: Path) -> None:
    assert [run_folder.git_state(folder) for folder in (tmp_path, Path(__file__).parent)] == [{}, {}]
    (tmp_path / "file").write_text("first")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"], ["tag", "-am", "a version", "v1"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "untracked").touch()
    found = run_folder.git_state(tmp_path)
    assert (len(found.pop("commit")), found) == (40, {"dirty": False})
    (tmp_path / "file").write_text("next")
    assert run_folder.git_state(tmp_path)["dirty"]


# --- goodput: the share of the time since the first launch in steps that count -----------------------------------

RUN = {"run__name": "run", "train__steps": 9, "checkpoint__every": 3, "log__every": 2, "eval__every": 4}


def test_rates_leave_out_what_is_no_training_and_waiting_for_data_is_shown(text: Path, tmp_path: Path) -> None:
    """A validation, a save and a sample after step 2 take a second and a half each, and so does the batch of step 3."""
    more = {"train__steps": 4, "eval__every": 2, "checkpoint__every": 2, "sample__every": 2, "sample__max_tokens": 2}
    fault = ",".join(f"slow:0:{step}:{site}" for step, site in ((2, "eval"), (2, "save"), (2, "sample"), (3, "batch")))
    command = tiny(text, tmp_path, **RUN | more | {"log__every": 1})
    said = succeeded(ranks(1, *command, fault=fault, env={"FAULT_SECONDS": "1.5"}))
    assert re.search(r"\nstep +3/4 .* eta [234]s .*\n(.*\n)*step +4/4 .* eta 0s ", said), "six seconds in three steps"
    logged = {record["step"]: record for record in records(tmp_path / "run") if "loss" in record}
    assert logged[3]["data_s"] >= 1.5 > max(logged[2]["data_s"], logged[4]["data_s"])
    for record in logged.values():
        assert record["seconds"] - record["data_s"] < 1.5
        assert record["tokens_per_second"] == pytest.approx(6 * 32 / record["seconds"], rel=0.01)
