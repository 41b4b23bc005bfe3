"""Runs tests/distributed/distributed_cases.py once on 4 processes, and shows each of its cases as a test."""

import re

import pytest

from tests.helpers import ROOT, ranks

CASES = re.findall(r"^def (case_\w+)", (ROOT / "tests/distributed/distributed_cases.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """The cases that passed, and what the processes said."""
    file = tmp_path_factory.mktemp("cases") / "passed"
    file.touch()
    said = ranks(4, str(file), entry="tests.distributed.distributed_cases").stderr
    return file.read_text().splitlines(), said


@pytest.mark.parametrize("name", CASES)
def test_on_4_ranks(name: str, report: tuple[list[str], str]) -> None:
    passed, said = report
    assert name in passed, said
