"""Goodput: each second since the first launch is of one kind, also after kills and damaged files."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import python, ranks, records, succeeded, tiny
from torchtitan_lite.monitoring import goodput, run_folder
from torchtitan_lite.monitoring.goodput import Clock
from torchtitan_lite.tools.report.page import since_launch, summary
from torchtitan_lite.tools.report.runs import read_run

RUN = {"run__name": "run", "train__steps": 9, "checkpoint__every": 3, "log__every": 2, "eval__every": 4}


class Hands:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def spent_in(**seconds: float) -> Clock:
    """A clock after so many seconds of each kind."""
    hands = Hands()
    clock = Clock(hands, age_s=0.0)
    for kind, s in seconds.items():
        with clock.on(kind):
            hands.now += s
    return clock


def written(folder: Path, *marks: tuple[int, float, dict[str, Any]], about: Any = None) -> Path:
    """A run's folder with these sums: step, time and seconds by kind."""
    lines = (json.dumps({"step": step, "spent": seconds, "time": when}) for step, when, seconds in marks)
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "run.json").write_text(json.dumps(about) if about is not None else "{")
    return folder


def resumed(folder: Path, step: int, clock: Clock | None = None) -> dict[str, float]:
    clock = clock or spent_in()
    clock.continue_run(folder, run_folder.read(folder), step)
    return clock.spent()


def test_each_second_has_one_kind() -> None:
    hands = Hands()
    clock = Clock(hands, age_s=5.0)
    hands.now += 1
    with clock.on("load"):
        hands.now += 2
        with clock.on("save"):
            hands.now += 4
    clock.enter("steps")
    hands.now += 8
    assert clock.spent() == {"steps": 8, "start": 6, "load": 2, "save": 4}
    assert goodput.share(clock.spent()) == 0.4


def test_steps_after_the_checkpoint_are_repeated(tmp_path: Path) -> None:
    now = time.time()
    marks = (10, now - 100, {"start": 5, "steps": 40}), (20, now - 60, {"start": 5, "save": 1, "steps": 80})
    spent = resumed(written(tmp_path, *marks), 10)
    assert 59 < spent.pop("idle") < 61
    assert spent == {"start": 5, "save": 1, "steps": 40, "repeated": 40}
    spent = resumed(tmp_path, 20)  # all of them count
    assert spent["steps"] == 80
    assert "repeated" not in spent


def test_a_second_kill_at_the_same_checkpoint_adds_to_what_is_repeated(tmp_path: Path) -> None:
    now = time.time()
    taken_over = {"goodput": {"seconds": {"start": 9, "steps": 40, "repeated": 40}}, "step": 10, "time": now - 50}
    marks = (10, now - 100, {"start": 5, "steps": 40}), (14, now, {"start": 9, "steps": 56, "repeated": 40})
    spent = resumed(written(tmp_path, *marks, about=taken_over), 10)
    assert (spent["steps"], spent["repeated"], spent["start"]) == (40, 56, 9)


def test_a_clock_that_was_set_back_leaves_no_negative_time(tmp_path: Path) -> None:
    written(tmp_path, (10, time.time() + 1e6, {"start": 5, "steps": 40}))
    assert resumed(tmp_path, 10, spent_in(start=3)) == {"start": 8, "steps": 40}


def test_an_attempt_that_writes_no_sums_is_idle_time(tmp_path: Path) -> None:
    """One that finds the run finished renews the time of run.json."""
    now = time.time()
    about = {"goodput": {"seconds": {"steps": 5.0}, "time": now - 1000}, "step": 10, "time": now}
    assert resumed(written(tmp_path, about=about), 10)["idle"] == pytest.approx(1000, abs=5)


def test_a_clock_that_was_not_set_makes_no_idle_time(tmp_path: Path) -> None:
    """A machine without a battery starts in 1970."""
    about = {"goodput": {"seconds": {"steps": 5.0}, "time": 40.0}, "step": 10, "time": 40.0}
    spent = resumed(written(tmp_path, about=about), 10)
    assert spent["steps"] == 5
    assert "idle" not in spent


DAMAGED: list[Any] = [-1, "x", None, True, [], 1e300, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize("value", DAMAGED, ids=lambda value: str(value)[:9])
def test_damaged_sums_are_left_out(tmp_path: Path, value: Any) -> None:
    bad = {"steps": value, "start": 5}
    about = {"goodput": {"seconds": bad, "time": 0}, "step": 10, "time": 0}
    written(tmp_path, (10, 0, bad), (10, 0, value), (10, value, {"steps": 1}), about=about)
    spent = resumed(tmp_path, 10)
    assert all(s >= 0 for s in spent.values())
    assert spent.get("start", 0) == 0
    for broken in (about, {"goodput": value}, {"goodput": {"seconds": value}}):
        assert goodput.newest(broken, [{"spent": value}]) == {}
    assert goodput.share({}) == 0


def test_a_killed_run_adds_up_to_the_wall_time(text: Path, tmp_path: Path) -> None:
    """SIGKILL in step 9, after the checkpoint of step 6. Steps 7 and 8 are repeated."""
    assert ranks(1, *tiny(text, tmp_path, **RUN), fault="kill:0:9:step").returncode
    run = tmp_path / "run"
    about = json.loads((run / "run.json").read_text())
    launched = about["started"] - sum(first(records(run)).values())
    killed = goodput.newest(about, records(run))
    at_checkpoint = [r["spent"] for r in records(run) if "spent" in r and r["step"] == 6][-1]
    said = succeeded(ranks(1, *tiny(text, tmp_path, **RUN)))

    about = json.loads((run / "run.json").read_text())
    shares, seconds = about["goodput"], about["goodput"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(about["time"] - launched, abs=0.5)
    assert seconds["repeated"] == pytest.approx(killed["steps"] - at_checkpoint["steps"], abs=0.01)
    assert all(seconds[kind] > 0 for kind in goodput.KINDS)
    assert shares["share"] == pytest.approx(seconds["steps"] / sum(seconds.values()), abs=1e-3)
    assert shares["share_without_idle"] > shares["share"]
    assert f", goodput {shares['share']:.0%} of " in said
    shown, status = read_run(run), succeeded(python(str(run), script="-m torchtitan_lite.status"))
    assert shown.goodput == seconds
    assert f"<b>{seconds['steps'] / sum(seconds.values()):.1%}</b>" in summary([shown])
    assert all(text in since_launch(shown) for text in goodput.KINDS.values())
    assert f"time    goodput {shares['share']:.0%} of " in status
    counted = [r["spent"]["steps"] for r in records(run) if "spent" in r]
    assert counted == sorted(counted)
    assert {r["step"] for r in records(run) if "spent" in r} == {2, 3, 4, 6, 8, 9}


def first(found: list[dict[str, Any]]) -> dict[str, float]:
    """The seconds until the first step."""
    spent = next(r["spent"] for r in found if "spent" in r)
    return {kind: spent[kind] for kind in ("start", "load")}


def test_a_run_that_starts_over_counts_from_its_own_launch(text: Path, tmp_path: Path) -> None:
    values = RUN | {"train__steps": 3, "eval__every": 0}
    succeeded(ranks(1, *tiny(text, tmp_path, **values)))
    before = json.loads((tmp_path / "run" / "run.json").read_text())["goodput"]["seconds"]
    succeeded(ranks(1, *tiny(text, tmp_path, **values), "--checkpoint.resume=never"))
    after = json.loads((tmp_path / "run" / "run.json").read_text())["goodput"]["seconds"]
    assert "idle" not in after
    assert "repeated" not in after
    assert before["steps"] > 0
