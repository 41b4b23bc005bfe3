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


def test_an_attack_that_succeeds_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bits = ROWS["bits"]._replace(attack=lambda _: {defects.DCP: "150 loaded", "full dcp": "149 refused, 1 loaded"})
    monkeypatch.setattr(defects, "rows_of", lambda _: {"bits": bits})
    assert defects.main([]) == 1
    assert "that succeeded: bits, full dcp" in capsys.readouterr().out


def test_an_unknown_row_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        defects.main(["bit"])
    assert "no row is called bit; there are over," in capsys.readouterr().err
