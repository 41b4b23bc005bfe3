"""Collectives through shared memory: gloo's results, in FSDP on every mesh, and ranks that do not come."""

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cpu import shared_memory_cases as cases
from tests.helpers import HANGS_S, losses, ranks, run_distributed, succeeded, tiny
from torchtitan_lite.cpu import barrier

extended = pytest.mark.extended


@pytest.mark.parametrize(("n", "piece"), [
    (2, 1 << 12), (3, 64), pytest.param(2, 64, marks=extended), pytest.param(3, 1 << 12, marks=extended),
    pytest.param(4, 1 << 16, marks=extended),
])  # fmt: skip
def test_shared_memory_gathers_and_sums_as_gloo_does(n: int, piece: int) -> None:
    """With more than two ranks gloo adds in another order: it is compared with a sum in rank order, too."""
    run_distributed(cases.compare, n, piece)


@pytest.mark.parametrize("n", [2, 3, pytest.param(5, marks=extended)])
def test_no_rank_leaves_a_barrier_before_all_have_entered_it(n: int) -> None:
    run_distributed(cases.in_turns, n, 500)


@pytest.mark.parametrize("mesh", ["2", "2x1", "2x2", "4/2", pytest.param("3x1", marks=extended)])
def test_all_collectives_of_fsdp_use_it(mesh: str) -> None:
    """FSDP, NO_SHARD, HSDP, reshard_after_forward = 2."""
    n = {"2": 2, "2x1": 2, "3x1": 3}.get(mesh, 4)
    run_distributed(cases.used, n, mesh)


@pytest.mark.parametrize("broken", [0, 1])
def test_without_shared_memory_gloo_is_used(broken: int) -> None:
    run_distributed(cases.without, 2, broken)


@pytest.mark.parametrize(("case", "last"), [(cases.lost, None), (cases.late, "late")])
def test_a_rank_that_does_not_come_is_a_communication_error(case: Callable[..., str], last: str | None) -> None:
    assert run_distributed(case, 3) == ["noticed", "noticed", last]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "sem_clockwait"), reason="this libc has no sem_clockwait")
def test_a_clock_that_is_set_back_does_not_hide_that_a_rank_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock that was set back, a wait would end in an hour."""
    memory = torch.zeros(barrier.n_bytes(2) + 64, dtype=torch.uint8)
    address = memory.data_ptr() + -memory.data_ptr() % 64
    checked = threading.Event()

    def check(waited_s: float) -> None:
        checked.set()
        raise RuntimeError("Remote process exited")

    def wait() -> None:
        with pytest.raises(RuntimeError, match="exited"):
            mine.wait()

    mine = barrier.Barrier(address, 0, 2, check)
    mine.initialise()
    late = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: late)
    threading.Thread(target=wait, daemon=True).start()
    assert checked.wait(HANGS_S)


def test_a_signal_is_handled_while_a_rank_waits() -> None:
    run_distributed(cases.interrupted, 2)


@pytest.mark.parametrize("mesh", [{}, pytest.param({"fsdp__dp_replicate": 2}, marks=extended)])
@extended
def test_a_run_through_shared_memory_is_the_run(mesh: dict[str, int], text: Path, tmp_path: Path) -> None:
    """Two ranks add two numbers: the same bits."""
    n = 4 if mesh else 2
    for name, on in (("shared", True), ("sent", False)):
        more = {"run__name": name, "speed__shared_memory": on, "fsdp__param_dtype": "bfloat16", **mesh}
        succeeded(ranks(n, *tiny(text, tmp_path, train__steps=4, train__global_batch_size=8, **more)))
    assert losses(tmp_path / "shared") == losses(tmp_path / "sent")
