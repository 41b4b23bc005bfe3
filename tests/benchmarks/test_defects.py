"""`python -m benchmarks.defects`: what attacks do to this project. Answers of other tools may change with versions."""

from pathlib import Path

import pytest

from benchmarks import defects

ROWS = defects.rows_of(Path("no such interpreter"))
CHEAP = "pickles", "threads"


@pytest.mark.parametrize("name", [n if n in CHEAP else pytest.param(n, marks=pytest.mark.extended) for n in ROWS])
def test_this_project_holds_each_attack(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = defects.main([name, "--newer-torch=no such interpreter"])
    said = capsys.readouterr().out
    assert code == 0, said
    (row,) = [line for line in said.splitlines() if line.startswith(f"| {ROWS[name].defect} |")]
    assert ("not run" if name == "torch" else "four ways" if "four ways" in row else defects.SHARDED[0]) in row
