"""Writing files: what fails is named, replaces nothing and leaves nothing behind."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from torchtitan_lite import files
from torchtitan_lite.run import attempts


def test_an_error_of_writing_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, expected in (
        (OSError(28, "No space left"), "[Errno 28] No space left: 'mine'"),
        (OSError(27, "File too large", "its"), "[Errno 27] File too large: 'its'"),
    ):
        with pytest.raises(OSError) as caught, files.naming("mine"):  # noqa: PT011
            raise error
        assert str(caught.value) == expected
    (tmp_path / "folder").mkdir()
    files.write_durably(tmp_path / "file", b"first")
    files.write_durably(tmp_path / "file", b"next")
    with pytest.raises(IsADirectoryError):
        files.write_durably(tmp_path / "folder", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"], "a temporary file is left"
    assert (tmp_path / "file").read_bytes() == b"next"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=PermissionError(13, "mine")))
        with pytest.raises(PermissionError, match="mine"):
            files.write_durably(tmp_path / "new", b"")
    monkeypatch.setattr(os, "fsync", synced := Mock(side_effect=[OSError(5, "Input/output error"), None, None]))
    with pytest.raises(OSError, match="Input/output error: '.*file"):
        files.write_durably(tmp_path / "file", b"lost")
    attempts.add(tmp_path, {"attempt": 1})  # a line of the history and its folder are on the disk
    assert (synced.call_count, (tmp_path / "file").read_bytes()) == (3, b"next"), "what is not replaces nothing"
