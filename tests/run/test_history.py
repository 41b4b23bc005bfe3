"""The history of a run: attempts.jsonl, and which records count, whatever a kill has left."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.files import append_line
from torchtitan_lite.run import attempts


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


@pytest.mark.parametrize("left", [b'{"attempt": 2, "ti', b"{", b"\0" * 9, b"\xff", b"[]", b'{"attempt": 1, "ended": "'])
def test_a_torn_last_line_is_ignored_and_the_next_line_is_its_own(left: bytes, tmp_path: Path) -> None:
    """A kill or a full disk can cut a line anywhere."""
    begin(tmp_path, 1, 0)
    with (tmp_path / attempts.FILE).open("ab") as file:
        file.write(left)
    assert [attempt.attempt for attempt in attempts.read(tmp_path)] == [1]
    begin(tmp_path, 2, 4)
    assert [(attempt.attempt, attempt.step) for attempt in attempts.read(tmp_path)] == [(1, 0), (2, 4)]


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
