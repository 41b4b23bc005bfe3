"""Files of records, whatever a kill or a full disk has left in them."""

import json
from pathlib import Path

import pytest

from torchtitan_lite.monitoring import records
from torchtitan_lite.monitoring.metrics import Log
from torchtitan_lite.monitoring.records import without_later


def test_a_line_after_a_torn_one_begins_anew(tmp_path: Path) -> None:
    """The disk was full in the middle of a line, and has room again."""
    log = Log(tmp_path, speaks=True)
    log.record({"step": 1})
    file = tmp_path / "metrics.jsonl"
    kept = file.read_bytes()
    file.unlink()
    file.mkdir()  # as good as a full disk
    log.record({"step": 2})
    file.rmdir()
    file.write_bytes(kept + b'{"step": 2, "ti')
    log.record({"step": 3})
    log.record({"step": 4})
    lines = file.read_text().splitlines()
    assert [json.loads(line)["step"] for line in (lines[0], *lines[2:])] == [1, 3, 4]


def test_damaged_records_are_cut(tmp_path: Path) -> None:
    """Whatever is in the file: the records up to the step stay, byte for byte, and nothing is raised."""
    good = [b'{"step": 1, "time": 1.5}\n', b'{"step": 3, "text": "caf\\u00e9 \\u2028 \\u000b"}\n']
    odd = [
        b"\xff\xfe not utf-8\n", b"\n", b"[]\n", b"{}\n", b'{"step": "x"}\n', b'{"step": null}\n',
        b'{"step": ' + b"9" * 400 + b"}\n", b'{"step": ' + b"9" * 5000 + b"}\n", b"[" * 100_000 + b"\n",
        b'{"step": NaN}\n', b'{"step": 4}\n', b"\0" * 100 + b"\n", b'{"step": 2}',
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_bytes(good[0] + b"".join(odd[:6]) + good[1] + b"".join(odd[6:]))
    (tmp_path / "samples.jsonl").mkdir()
    assert without_later(tmp_path, 3) == {"metrics.jsonl": b"".join(good)}


@pytest.mark.parametrize(("step", "is_read"), [
    (0, True), (2**53 - 1, True), (2**53, False), (10**400, False), ("5", False), (None, False), (True, False),
    (2.0, False), ([5], False),
])  # fmt: skip
def test_only_records_with_a_step_are_read(step: object, is_read: bool, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert list(records.read(file)) == []
    file.write_bytes(b'{"step": 1, "lo\n' + json.dumps({"step": step}).encode() + b'\n[]\n{"step": 7}\n{"step')
    assert list(records.read(file)) == [{"step": step}] * is_read + [{"step": 7}]
