"""Writing files: what fails is named, replaces nothing and leaves nothing behind."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock, call, patch

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
    with pytest.raises(IsADirectoryError):
        files.write_durably(tmp_path / "folder", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"], "a temporary file is left"
    with (
        patch.object(Path, "open", side_effect=PermissionError(13, "mine")),
        pytest.raises(PermissionError, match="mine"),
    ):
        files.write_durably(tmp_path / "new", b"")
    sizes, failed = Mock(), Mock(side_effect=OSError(5, "Input/output error"))
    then: Iterator[Callable[[], object]] = iter(
        [lambda: files.write_durably(tmp_path / "file", b"meanwhile"), int, failed, int, int]
    )
    monkeypatch.setattr(os, "fsync", lambda file: (sizes(os.fstat(file).st_size), next(then)()))
    files.write_durably(tmp_path / "file", b"next")  # while another process writes it, too
    with pytest.raises(OSError, match="Input/output error: '.*file"):
        files.write_durably(tmp_path / "file", b"lost")
    attempts.add(tmp_path, {"attempt": 1})  # a line of the history and its folder are on the disk
    assert [*map(call, [4, 9, 4, (tmp_path / "attempts.jsonl").stat().st_size])] == sizes.call_args_list[:-1]
    assert (tmp_path / "file").read_bytes() == b"next", "what is not replaces nothing"
