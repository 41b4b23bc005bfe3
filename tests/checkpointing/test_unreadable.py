"""A checkpoint that is temporarily unreadable is not damaged: nothing is deleted."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import checkpoint, ranks, succeeded, tiny
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.errors import CheckpointError

FILES = ("manifest.json", "state.json")


def small(checkpoints: Path, step: int = 4) -> Path:
    """A checkpoint without tensors."""
    return storage.commit(storage.new_folder(checkpoints, step), TrainState(step=step), "full", 1, {})


def failing(monkeypatch: pytest.MonkeyPatch, file: Path, number: int) -> None:
    """Have every way of opening or looking at a file fail."""
    honest: dict[str, Any] = {name: getattr(Path, name) for name in ("open", "stat", "read_text", "read_bytes")}

    def fails(name: str) -> Any:
        def call(self: Path, *args: Any, **kwargs: Any) -> Any:
            if self == file:
                raise OSError(number, os.strerror(number), str(self))
            return honest[name](self, *args, **kwargs)

        return call

    for name in honest:
        monkeypatch.setattr(Path, name, fails(name))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", FILES)
def test_a_disk_error_is_not_damage(name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small(tmp_path)
    failing(monkeypatch, folder / name, number)
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        storage.verify(folder)
    assert str(folder / name) in str(caught.value)
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_damage(name: str, tmp_path: Path) -> None:
    folder = small(tmp_path)
    (folder / name).unlink()
    assert any(name in problem for problem in storage.verify(folder))


@pytest.mark.extended
def test_a_run_stops_on_every_rank_and_moves_nothing(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", train__steps=4, checkpoint__every=2, eval__every=0)
    succeeded(ranks(2, *command))
    result = ranks(2, *command, "--train.steps=6", fault="eio:1:0:hash")
    assert result.returncode != 0
    assert f"{checkpoint(tmp_path / 'run', 4)}" in result.stderr
    assert "can't be read: Input/output error" in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == ["step-00000002", "step-00000004"]
    assert "resumed after step 4" in succeeded(ranks(2, *command, "--train.steps=6"))
