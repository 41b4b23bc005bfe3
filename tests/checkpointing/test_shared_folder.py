"""A run and `checkpoint.py convert` share a folder; a save is committed although the folder can't be listed."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ranks, records, succeeded, tiny
from torchtitan_lite.checkpointing import safetensors_file, storage
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.tools import checkpoints


def test_convert_leaves_the_save_of_a_run_alone(sharded: Path, tmp_path: Path) -> None:
    saving = storage.begin(tmp_path, 5)
    (saving / "model.safetensors").write_bytes(b"half")
    checkpoints.convert(storage.step_folder(sharded / "checkpoints", 2), tmp_path)
    assert (saving / "model.safetensors").read_bytes() == b"half"
    assert storage.find_steps(tmp_path) == [2]


def while_it_writes(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Something that a run does while `convert` is at work."""
    honest = safetensors_file.write_tensors

    def write_tensors(*args: Any, **kwargs: Any) -> Any:
        action()
        return honest(*args, **kwargs)

    monkeypatch.setattr(checkpoints, "write_tensors", write_tensors)


def test_the_save_of_a_run_leaves_convert_alone(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    while_it_writes(monkeypatch, lambda: storage.begin(tmp_path, 5))
    folder = checkpoints.convert(storage.step_folder(sharded / "checkpoints", 2), tmp_path)
    assert storage.verify(folder) == []


def test_convert_does_not_replace_what_a_run_has_saved_meanwhile(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save() -> None:
        if not storage.find_steps(tmp_path):
            storage.commit(storage.begin(tmp_path, 2), TrainState(step=2, tokens=77), "full", 1, {})

    while_it_writes(monkeypatch, save)
    with pytest.raises(CheckpointError, match="step-00000002 already exists"):
        checkpoints.convert(storage.step_folder(sharded / "checkpoints", 2), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"], "nothing is left of it"
    assert storage.read_state(storage.step_folder(tmp_path, 2)).tokens == 77


@pytest.mark.extended
def test_a_committed_save_is_reported_as_saved_though_retention_fails(text: Path, tmp_path: Path) -> None:
    """All ranks agree on it: otherwise rank 0 alone would stop after the last one."""
    more = {"train__steps": 4, "checkpoint__every": 2, "eval__every": 0, "checkpoint__keep_latest": 1}
    command = tiny(text, tmp_path, run__name="run", **more)
    output = succeeded(ranks(2, *command, fault="error:0:2:after rename:2"))
    assert "NOT SAVED" not in output
    assert "step-00000004  (" in output
    said = [line for line in output.splitlines() if line.startswith("note    older")]
    assert len(said) == 2
    assert all("No space left on device" in line for line in said)
    assert [r["step"] for r in records(tmp_path / "run") if "save_s" in r] == [2, 4]
    assert storage.find_steps(tmp_path / "run/checkpoints") == [2, 4]
