"""The history of a run: attempts.jsonl, and which records count, whatever a kill has left."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.files import append_line, write_durably
from torchtitan_lite.run import attempts
from torchtitan_lite.run.metrics import Log


def begin(folder: Path, number: int, step: int) -> None:
    about: dict[str, Any] = {
        "command": ["train.py"],
        "config": {"train.steps": 9},
        "setting": {"threads": 1},
        "tasks": {},
    }
    about |= {"world_size": 1, "hosts": ["a"], "versions": {"torch": "2"}, "git": {}, "device": "cpu"}
    attempts.add(folder, {"attempt": number, "time": 1.0, "step": step, "samples": 8 * step, **about})


def record(folder: Path, number: int, *steps: int) -> None:
    for step in steps:
        append_line(folder / "metrics.jsonl", json.dumps({"step": step, "attempt": number}))


def counting(folder: Path) -> list[tuple[int, int]]:
    return [(record["attempt"], record["step"]) for record in attempts.records(folder)]


def test_an_attempt_that_ended_has_its_end(tmp_path: Path) -> None:
    assert attempts.read(tmp_path) == []
    begin(tmp_path, 1, 0)
    attempts.add(tmp_path, {"attempt": 1, "ended": "preempted", "last_step": 4, "reason": "SIGTERM", "end_time": 2.0})
    begin(tmp_path, 2, 4)
    first, second = attempts.read(tmp_path)
    assert (first.ended, first.last_step, first.reason, first.samples) == ("preempted", 4, "SIGTERM", 0)
    assert (second.attempt, second.step, second.samples, second.ended) == (2, 4, 32, "")


@pytest.mark.parametrize("left", [b'{"attempt": 2, "ti', b"{", b"\0" * 9, b"\xff", b"[]", b'{"attempt": 1, "ended": "'])
def test_a_torn_last_line_is_ignored_and_the_next_line_is_its_own(left: bytes, tmp_path: Path) -> None:
    """A kill or a full disk can cut a line anywhere."""
    begin(tmp_path, 1, 0)
    with (tmp_path / attempts.FILE).open("ab") as file:
        file.write(left)
    assert [attempt.attempt for attempt in attempts.read(tmp_path)] == [1]
    begin(tmp_path, 2, 4)
    assert [(attempt.attempt, attempt.step) for attempt in attempts.read(tmp_path)] == [(1, 0), (2, 4)]


def test_a_step_was_made_by_the_last_attempt_that_began_before_it(tmp_path: Path) -> None:
    for number, step in ((1, 0), (2, 4), (3, 2), (4, 2), (5, 6)):
        begin(tmp_path, number, step)
    found = [attempts.of_step(attempts.read(tmp_path), step) for step in range(8)]
    assert [attempt.attempt if attempt else None for attempt in found] == [None, 1, 1, 4, 4, 4, 4, 5]


def test_a_later_attempt_replaces_the_records_of_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    assert counting(tmp_path) == []
    begin(tmp_path, 1, 0)
    record(tmp_path, 1, 1, 2, 3, 4, 5)
    begin(tmp_path, 2, 2)
    assert counting(tmp_path) == [(1, 1), (1, 2)], "it will make steps 3 to 5 again"
    record(tmp_path, 2, 2, 3, 4)  # what was due at step 2 is made up for
    begin(tmp_path, 3, 3)
    begin(tmp_path, 4, 2)  # the checkpoint of step 3 was damaged
    assert counting(tmp_path) == [(1, 1), (1, 2), (2, 2)]
    record(tmp_path, 4, 3, 4)
    assert counting(tmp_path) == [(1, 1), (1, 2), (2, 2), (4, 3), (4, 4)]


def test_records_that_a_kill_has_cut_are_ignored(tmp_path: Path) -> None:
    record(tmp_path, 1, 1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "atte')
    record(tmp_path, 2, 2)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3}')  # cut before its newline
    record(tmp_path, 3, 4)
    assert [record["step"] for record in attempts.records(tmp_path)] == [1, 2, 3, 4]


def test_a_line_after_a_torn_one_begins_anew(tmp_path: Path) -> None:
    """The disk was full in the middle of a line, and has room again."""
    log = Log(tmp_path, speaks=True)
    log.record({"step": 1})
    file = tmp_path / "metrics.jsonl"
    kept = file.read_bytes()
    file.unlink()
    file.mkdir()  # as good as a full disk
    log.record({"step": 2})
    file.rmdir()
    file.write_bytes(kept + b'{"step": 2, "ti')
    log.record({"step": 3})
    log.record({"step": 4})
    assert [record["step"] for record in attempts.records(tmp_path)] == [1, 3, 4]


def _write_often(file: Path, content: bytes, start: Any) -> None:
    start.wait()
    for _ in range(300):
        write_durably(file, content)


def test_two_processes_that_write_a_file_at_the_same_moment_do_not_mix(tmp_path: Path) -> None:
    """Two ranks that write that a third was lost, in run.json."""
    file, fork = tmp_path / "run.json", multiprocessing.get_context("fork")
    contents, start = [b"a" * 50_000, b"b" * 90], fork.Barrier(3)
    writers = [fork.Process(target=_write_often, args=(file, content, start)) for content in contents]
    for writer in writers:
        writer.start()
    start.wait()
    while any(writer.is_alive() for writer in writers):
        assert not file.exists() or file.read_bytes() in contents
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert file.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [file]
