"""The reader of a run's records: damaged, cut and overlong lines."""

import json
from pathlib import Path

import pytest

from torchtitan_lite.tools import records, status

LINES = [json.dumps({"step": n, "loss": 1.0}) + "\n" for n in range(10, 14)]


@pytest.mark.parametrize(("n_bytes", "steps", "n_damaged"), [
    (0, [10, 11, 12, 13], 0),
    (2 * len(LINES[0]), [12, 13], 0),
    (2 * len(LINES[0]) + 1, [12, 13], 1),  # the newline before
    (2 * len(LINES[0]) - 1, [13], 1),  # a line that is cut
    (10**6, [10, 11, 12, 13], 0),
])  # fmt: skip
def test_the_end_of_a_file_is_read(n_bytes: int, steps: list[int], n_damaged: int, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(LINES))
    found, damaged = records.read_records(tmp_path / "x.jsonl", n_bytes)
    assert ([record["step"] for record in found], damaged) == (steps, n_damaged)


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read in parts, which count as damaged; the longest line that is allowed is read."""
    assert records.read_records(tmp_path / "x.jsonl") == ([], 0), "a missing file"
    monkeypatch.setattr(records, "LONGEST_LINE", len(LINES[0]))
    (tmp_path / "x.jsonl").write_text("".join([LINES[0], "x" * (2 * len(LINES[0]) + 5) + "\n", LINES[1]]))
    found, damaged = records.read_records(tmp_path / "x.jsonl")
    assert ([record["step"] for record in found], damaged) == ([10, 11], 3)


@pytest.mark.parametrize(("value", "kept"), [
    ("1e100", 1e100), ("1e101", None), ("NaN", "null"), ("Infinity", "null"), ("null", "null"), ("true", None),
    ("[1]", None), ("9" * 101, None), ('"1"', None),
])  # fmt: skip
@pytest.mark.parametrize("key", ["loss", "task/x", "val_loss/x", "other"])
def test_numbers_are_finite_or_none(value: str, kept: object, key: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"step": 1, "{key}": {value}}}\n')
    found, damaged = records.read_records(tmp_path / "x.jsonl")
    if key == "other":
        assert (len(found), damaged) == (1, 0)
    elif kept is None:
        assert (found, damaged) == ([], 1)
    else:
        assert found == [{"step": 1, key: None if kept == "null" else kept}]


def test_the_status_reads_only_the_end_of_a_long_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"step": n, "loss": 1.0, "time": 1.8e9, "tokens_per_second": 10.0 * n}) for n in range(10, 14)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "run.json").write_text('{"status": "complete", "steps": 13}')
    monkeypatch.setattr(status, "_TAIL", 2 * len(lines[0]) + 2)
    assert status.main([str(tmp_path)]) == 0
    assert "130 tokens per second (median of 2 records)" in capsys.readouterr().out
