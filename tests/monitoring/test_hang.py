"""Steps that hang where no error arrives, as under NCCL: the process ends by itself, with names, status and stacks."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import ranks
from tests.monitoring.blocked_worker import TIMEOUT_MINUTES
from torchtitan_lite.checkpointing import progress
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import StuckError
from torchtitan_lite.monitoring.hang import Place, StepTimer
from torchtitan_lite.monitoring.watchdog import explained


@pytest.mark.parametrize(("case", "said"), [
    ("rank 1 fetches", "behind: rank 1 (step 4, fetching its batch). "),
    ("rank 0 fetches", "behind: rank 0 (step 4, fetching its batch). "),
    pytest.param("same place", "all ranks had reached it. ", marks=pytest.mark.extended),
    pytest.param("forward pass", "behind: rank 1 (step 4, computing, forward pass 0). ", marks=pytest.mark.extended),
])  # fmt: skip
def test_a_rank_that_is_blocked_in_c_ends_by_itself(case: str, said: str, tmp_path: Path) -> None:
    result = ranks(2, str(tmp_path), case, entry="tests.monitoring.blocked_worker", timeout=90)
    assert result.returncode == 1
    assert f"waited for the other ranks for nine tenths of run.timeout_minutes = {TIMEOUT_MINUTES}; {said}" in (
        result.stderr
    )
    status = json.loads((tmp_path / "run.json").read_text())
    assert status["status"] == "failed"
    assert said in status["reason"]
    for rank in range(2):
        assert "blocked_worker.py" in (tmp_path / f"stacks/rank-{rank}.txt").read_text()


class FakeStore(dict[str, bytes]):
    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def timer(device: str, mine: Place, other: Place, clock: list[float]) -> Callable[[float], str]:
    """Rank 0 of two: a function that lets seconds pass, a tenth of the interval at a time, and says what is wrong."""
    store: Any = FakeStore()
    world = World(0, 2, torch.device(device), 1)
    found = StepTimer(world, store, timeout_s=1000, interval_s=10, stacks=Path("stacks"))
    StepTimer(World(1, 2, torch.device(device), 1), store, 1000, 10, Path()).publish(store, other)

    def after(seconds: float) -> str:
        for _ in range(int(seconds // 10)):
            clock[0] += 10
            if said := found.problem(mine, {}):
                return said
        return ""

    assert not found.problem(mine, {})
    return after


AHEAD, SAME, BEHIND = Place(4, 1, 2), Place(4, 1, 1), Place(4, 0)


@pytest.mark.parametrize(("text", "expected"), [
    (
        "[/pytorch/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete",
        "waited for the other ranks for run.timeout_minutes = 1; rank 2 silent for 42 s (its process is stopped, or "
        "its machine does not answer; last seen: step 4, computing); behind: rank 1 (step 4, fetching its batch). "
        "Stacks of processes that took too long are in stacks; a process that is stopped or was killed writes none. "
        "(Timed out waiting 60000ms for recv operation to complete)",
    ),
    (
        "[/pytorch/pair.cc:537] Read error [::1]:80: Connection reset by peer. This is typically caused by bugs.\nMore",
        "connection reset: a process died: rank 1 (last seen: step 4, fetching its batch). If that process printed no "
        "error, it was killed; dmesg on its machine names it if the kernel did so for lack of memory. "
        "(Read error [::1]:80: Connection reset by peer)",
    ),
])  # fmt: skip
def test_a_dead_rank_and_a_silent_one_are_told_apart(text: str, expected: str) -> None:
    store: Any = FakeStore()
    of = [StepTimer(World(rank, 3, torch.device("cpu"), 1, 3), store, 60, 1, Path("stacks")) for rank in range(3)]
    of[1].publish(store, BEHIND)
    of[2].publish(store, SAME)
    assert of[0].explain(RuntimeError(text), SAME, {2: 42.4}, [1]) == f"rank 0, step 4: {expected}"


def test_a_rank_that_hangs_within_a_pass_is_named_by_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = FakeStore()
    of = [StepTimer(World(rank, 3, torch.device("cpu"), 1, 3), store, 60, 1, Path("stacks")) for rank in range(3)]
    for timer in of[1:]:
        timer.publish(store, SAME)
    error = RuntimeError("Timed out waiting 60000ms at a barrier in shared memory: rank 1, 2")
    assert "; behind: rank 1 (step 4, computing, forward pass " in of[0].explain(error, SAME, {}, [])
    said = of[0].explain(error, SAME, {2: 42.4}, [])
    assert "rank 2 silent for 42 s" in said
    assert said.count("rank 2 ") == 1
    monkeypatch.setattr(of[0], "_places", dict)  # what it returns if the store does not answer within five seconds
    said = of[0].explain(RuntimeError("Timed out waiting 60000ms"), SAME, {}, [])
    assert "where the others are is unknown: the store does not answer" in said


def test_a_rank_that_dies_before_there_is_a_watchdog_leaves_no_traceback() -> None:
    world, reset = World(0, 2, torch.device("cpu"), 1), RuntimeError("Read error [::1]:80: Connection reset by peer")
    said = r"^rank 0, starting: connection reset: a process died\. "
    with pytest.raises(StuckError, match=said) as caught, explained(world):
        raise reset
    assert caught.value.follows
    for error, its_world in ((RuntimeError("size mismatch"), world), (reset, World(0, 1, torch.device("cpu"), 1))):
        with pytest.raises(RuntimeError), explained(its_world):
            raise error


def test_it_ends_before_the_timeout_and_not_much_earlier(clock: list[float]) -> None:
    after = timer("cuda", SAME, BEHIND, clock)
    clock[0] += 100_000
    assert not after(850), "the time of a stopped process counts as two intervals"
    assert "behind: rank 1 (step 4, fetching its batch)" in after(30)
    after = timer("cuda", SAME, SAME, clock)
    with progress.doing("saving step 4"):
        assert not after(5000), "a long save has no time limit"
    assert not after(870), "and the time starts again"
    assert "step 4: waited for the other ranks for nine tenths" in (said := after(30))
    assert "all ranks had reached it" in said


@pytest.mark.parametrize(("device", "mine", "other"), [
    ("cuda", SAME, AHEAD),  # the other one waits, and this one may be computing
    ("cuda", BEHIND, Place(4, 0)),  # both read their data
    ("cuda", Place(5, 0), SAME),  # this one does
    ("cuda", Place(), Place()),  # before the first step there are only saves and loads
    ("cpu", SAME, SAME),  # gloo has a time limit of its own
])  # fmt: skip
def test_slow_is_not_hanging(device: str, mine: Place, other: Place, clock: list[float]) -> None:
    assert not timer(device, mine, other, clock)(5000)


def test_compiling_has_no_time_limit(clock: list[float]) -> None:
    compiles, done = threading.Event(), threading.Event()

    def backend(graph: Any, _: Any) -> Any:
        compiles.set()
        assert done.wait(60)
        return graph.forward

    compiled = torch.compile(lambda x: 2 * x, backend=backend)
    thread = threading.Thread(target=compiled, args=(torch.ones(2),))
    thread.start()
    assert compiles.wait(60)
    assert not timer("cuda", SAME, SAME, clock)(5000)
    assert timer("cuda", SAME, BEHIND, clock)(5000), "the collective of the others' gives up nevertheless"
    done.set()
    thread.join()
    assert timer("cuda", SAME, SAME, clock)(5000)
