"""Collectives through shared memory: gloo's results, in FSDP on every mesh, and ranks that do not come."""

from collections.abc import Callable

import pytest

from tests.cpu import shared_memory_cases as cases
from tests.helpers import run_distributed

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


def test_a_signal_is_handled_while_a_rank_waits() -> None:
    run_distributed(cases.interrupted, 2)
