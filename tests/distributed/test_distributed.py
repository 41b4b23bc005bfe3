"""Runs the cases of distributed_cases.py."""

from tests.distributed.distributed_cases import all_cases
from tests.helpers import run_distributed


def test_all_cases_on_4_ranks() -> None:
    run_distributed(all_cases, 4)


def test_a_collective_in_an_action_of_rank_0_raises_with_one_rank_too() -> None:
    run_distributed(all_cases, 1, only="action_of_rank_0")
