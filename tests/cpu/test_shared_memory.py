"""Collectives through shared memory: gloo's results, in FSDP on every mesh, and ranks that do not come."""

import pytest

from tests.cpu import shared_memory_cases as cases
from tests.helpers import run_distributed


@pytest.mark.parametrize("n", cases.CASES)
def test_shared_memory_computes_as_gloo_does_in_fsdp_too(n: int) -> None:
    """In FSDP, NO_SHARD, HSDP and with reshard_after_forward = 2. With more than two ranks gloo adds in another order:
    it is compared with a sum in rank order, too. Without shared memory gloo is used, and a late rank is named.
    """
    run_distributed(cases.all_cases, n)


def test_a_rank_that_ends_is_a_communication_error() -> None:
    run_distributed(cases.lost, 3)
