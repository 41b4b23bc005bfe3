"""Ranks that wait where no error arrives, as under NCCL: the run ends by itself with names, status and stacks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ranks, succeeded
from tests.run.blocked_worker import LIMITS, START_MINUTES
from torchtitan_lite.distributed.lost import explaining_lost_ranks
from torchtitan_lite.errors import StuckError
from torchtitan_lite.run.watchdog import Place, RankState, explain_hang

WORKER = "tests.run.blocked_worker"
extended = pytest.mark.extended


@pytest.mark.parametrize(("case", "said"), [
    ("rank 1 fetches", "the others wait for rank 1 (step 4, fetching its batch). "),
    pytest.param("rank 0 fetches", "the others wait for rank 0 (step 4, fetching its batch). ", marks=extended),
    pytest.param("same place", "all ranks are at the same place. ", marks=extended),
    pytest.param("forward pass", "wait for rank 1 (step 4, computing, forward pass 0). ", marks=extended),
    pytest.param("compiler hangs", "all ranks are at the same place. ", marks=extended),
])  # fmt: skip
def test_a_rank_that_is_blocked_in_c_ends_by_itself(case: str, said: str, tmp_path: Path) -> None:
    result = ranks(2, str(tmp_path), case, entry=WORKER, timeout=90)
    assert result.returncode == 1
    limit = f"run.timeout_minutes = {LIMITS.timeout_minutes:g}"
    assert f"train.py: step 4: no rank made progress for {limit}; " in result.stderr
    assert said in result.stderr
    status = json.loads((tmp_path / "run.json").read_text())
    assert status["status"] == "failed"
    assert said in status["reason"]
    for rank in range(2):
        assert "blocked_worker.py" in (tmp_path / f"stacks/rank-{rank}.txt").read_text()


@pytest.mark.parametrize(
    "case", ["compiles", *(pytest.param(c, marks=extended) for c in ("compiles elsewhere", "hashes"))]
)
def test_a_process_that_works_is_waited_for(case: str, tmp_path: Path) -> None:
    """For two and a half times the limit: a compilation in this process or another one, and a slow disk."""
    said = succeeded(ranks(2, str(tmp_path), case, entry=WORKER, timeout=90))
    assert said.count(" is done") == 2
    assert not (tmp_path / "stacks").exists()


def test_a_machine_that_dies_while_it_starts_ends_the_run_within_the_limit_of_a_start(tmp_path: Path) -> None:
    result = ranks(2, str(tmp_path), "stops", entry=WORKER, timeout=90)
    assert result.returncode == 1
    said = f"starting: no rank made progress for run.start_timeout_minutes = {START_MINUTES:g}; the others wait for"
    assert f"{said} rank 1, silent for " in result.stderr
    assert said in json.loads((tmp_path / "run.json").read_text())["reason"]


FETCHES, COMPUTES = RankState(Place(4, 0)), RankState(Place(4, 1, 1))
SAVES, WRITES = (RankState(Place(4, 1, 2), [(f"saving step 4{what}", bool(what))]) for what in ("", ": writing x"))


@pytest.mark.parametrize(("states", "silent", "said"), [
    ([COMPUTES, COMPUTES], {}, "step 4: no rank made progress for LIMIT; all ranks are at the same place"),
    ([COMPUTES, FETCHES, COMPUTES], {}, "step 4: *; the others wait for rank 1 (step 4, fetching its batch)"),
    (
        [COMPUTES, FETCHES, COMPUTES], {2: 42.4},
        "step 4: *; the others wait for rank 1 (step 4, fetching its batch), rank 2, silent for 42 s (its process is "
        "stopped, or its machine does not answer; last seen: step 4, computing)",
    ),
    ([SAVES, WRITES], {}, "saving step 4: *; the others wait for rank 1 (saving step 4: writing x)"),
    ([SAVES, COMPUTES], {}, "saving step 4: *; the others wait for rank 1 (step 4, computing)"),
    ([RankState()] * 2, {1: 9}, "starting: *; the others wait for rank 1, silent for 9 s (*; last seen: starting)"),
    ([COMPUTES], {1: 9}, "step 4: *; the others wait for rank 1, silent for 9 s (*; last seen: unknown)"),
])  # fmt: skip
def test_who_is_waited_for(states: list[RankState], silent: dict[int, float], said: str) -> None:
    got = explain_hang(dict(enumerate(states)), silent, "LIMIT")
    assert re.fullmatch(re.escape(said).replace(r"\*", ".*"), got), got


def test_a_rank_that_dies_before_there_is_a_watchdog_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: Any = RuntimeError("Read error [::1]:80: Connection reset by peer")
    monkeypatch.setenv("RANK", "0")
    for world_size, error in (("2", RuntimeError("size mismatch")), ("1", reset)):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with pytest.raises(RuntimeError), explaining_lost_ranks():
            raise error
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = r"^rank 0, starting: connection reset: a process died\. "
    with pytest.raises(StuckError, match=said) as caught, explaining_lost_ranks():
        raise reset
    assert caught.value.follows
