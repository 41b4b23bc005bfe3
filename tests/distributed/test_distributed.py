"""Runs the cases of distributed_cases.py."""

from tests.distributed.distributed_cases import all_cases
from tests.helpers import run_distributed


def test_all_cases_on_4_ranks() -> None:
    run_distributed(all_cases, 4)
