"""Small parts of every command: numbers in words, files, the environment of a launcher, and the commands it prints."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from torchtitan_lite import files, terminal
from torchtitan_lite.errors import shortened


def test_numbers_in_words() -> None:
    assert [terminal.counted(n, "file") for n in (0, 1, 1234)] == ["0 files", "1 file", "1,234 files"]
    durations: dict[float, str] = {
        **{59.4: "59s", 59.6: "1m00s", 252: "4m12s", 3599: "59m59s", 3600: "1h00m"},
        **{7500: "2h05m", 86399: "23h59m", 86400: "1d00h", 273600: "3d04h"},
    }
    assert {seconds: terminal.duration(seconds) for seconds in durations} == durations
    sizes: dict[float, str] = {
        **{0: "0.00 MiB", 1: "1 byte", 512: "512 bytes", 10485: "10,485 bytes", 10486: "0.01 MiB"},
        **{20.25 * 2**20: "20.25 MiB", 2**30 - 2**20: "1,023.00 MiB", 1.5 * 2**40: "1,536.00 GiB"},
    }
    assert {n: terminal.size(n) for n in sizes} == sizes
    assert [shortened("a" * 200), shortened(range(1, 5), 3)] == ["a" * 200, "ran... (11 characters)"]


def test_an_error_of_writing_names_the_file_and_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (65536, -1))
    limit = "the limit of this process is 65,536 bytes (ulimit -f)"
    for error, expected in (
        (OSError(27, "File too large"), f"[Errno 27] File too large: {limit}: 'mine'"),
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
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error: '.*file"):
        files.write_durably(tmp_path / "file", b"lost")
    assert (tmp_path / "file").read_bytes() == b"next", "what is not on the disk replaces nothing"
