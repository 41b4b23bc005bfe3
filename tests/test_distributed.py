"""Runs tests/distributed_cases.py once on 4 processes, and shows each of its cases as a test."""

import json
import re

import pytest

from tests.helpers import ROOT, succeeded, torchrun

CASES = re.findall(r"^def (case_\w+)", (ROOT / "tests/distributed_cases.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("cases") / "report.json"
    succeeded(torchrun(4, str(file), script="tests/distributed_cases.py"))
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", CASES)
def test_on_4_ranks(name: str, report: dict[str, str]) -> None:
    assert name in report, "the processes ended before this case"
    assert not report[name], report[name]
