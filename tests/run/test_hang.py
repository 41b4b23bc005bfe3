"""Ranks that wait where no error arrives, as under NCCL: the run ends by itself with names, status and stacks."""

import json
from pathlib import Path

import pytest

from tests.helpers import ranks, succeeded
from tests.run.blocked_worker import LIMITS, START_MINUTES

WORKER = "tests.run.blocked_worker"
extended = pytest.mark.extended


@pytest.mark.parametrize(("case", "said"), [
    ("fetches", "the others wait for rank 1 (step 4, fetching its batch). "),
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
