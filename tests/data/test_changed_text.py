"""Prepared data is compared with its text by content; a span of no tokens is empty."""

import json
import os
from pathlib import Path

import pytest

from torchtitan_lite.data.prepare.__main__ import main
from torchtitan_lite.data.token_files import TokenFiles, read_meta


def prepared(folder: Path, letter: str) -> Path:
    """A folder made of 64 short texts of one letter each."""
    lines = [json.dumps({"text": letter * 20 + f"{i:02d}"}) for i in range(64)]
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "text.jsonl"


def test_a_span_of_no_tokens_is_empty(tmp_path: Path) -> None:
    assert main([str(prepared(tmp_path, "a")), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    assert len(TokenFiles(tmp_path / "out", read_meta(tmp_path / "out"), "train").read(1, 1)) == 0


def test_other_text_of_the_same_size_and_time_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = prepared(tmp_path, "a")
    command = [str(text), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    before = text.stat()
    assert main(command) == 0
    assert main(command) == 0, "the same again"
    prepared(tmp_path, "b")
    os.utime(text, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert text.stat().st_size == before.st_size
    capsys.readouterr()
    assert main(command) == 2
    assert "was made from other text or options" in capsys.readouterr().err
