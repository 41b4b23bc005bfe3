"""What a run does, and leaves for the next start, when it is asked to stop."""

import json
from pathlib import Path

import pytest

from tests.helpers import checkpoint, losses, ranks, records, succeeded, tiny

AT_ONCE = {"run__max_minutes": 1e-9, "train__steps": 4}
WORK = {"eval__every": 2, "sample__every": 2, "sample__max_tokens": 2, "checkpoint__every": 2}


@pytest.fixture(scope="module")
def stopped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after each of its first two steps, and then completed."""
    folder = tmp_path_factory.mktemp("stopped")
    command = tiny(text, folder, run__name="run", **AT_ONCE | WORK)
    first = succeeded(ranks(1, *command))
    assert "stopped after step 1 of 4" in first
    assert checkpoint(folder / "run", 1).is_dir()
    assert not [line for line in first.splitlines() if line.startswith(("eval", "sample"))], "they are not due"
    second = succeeded(ranks(1, *command))
    assert "stopped after step 2 of 4" in second
    assert "eval    step 2  not scored before the run stops; the same command scores it" in second
    assert "sample  step 2  not made before the run stops; the same command makes it" in second
    succeeded(ranks(1, *tiny(text, folder, run__name="run", train__steps=4, **WORK)))
    return folder / "run"


def test_the_next_start_makes_up_for_what_a_stop_left_out(stopped: Path) -> None:
    assert [record["step"] for record in records(stopped) if "eval_s" in record] == [2, 4]
    samples = [json.loads(line)["step"] for line in (stopped / "samples.jsonl").read_text().splitlines()]
    assert samples == [2, 4]


def test_stops_change_no_number(stopped: Path, text: Path, tmp_path: Path) -> None:
    succeeded(ranks(1, *tiny(text, tmp_path, run__name="run", train__steps=4, **WORK)))
    assert losses(stopped) == losses(tmp_path / "run")
    mine, theirs = (
        [(record["step"], record["val_loss"]) for record in records(run) if "val_loss" in record]
        for run in (stopped, tmp_path / "run")
    )
    assert mine == theirs
