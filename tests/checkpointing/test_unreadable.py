"""A checkpoint that is temporarily unreadable is not damaged, and a save whose retention fails is a save."""

import os
from pathlib import Path

import pytest
import torch

from tests.checkpointing.reload_worker import State, save_now
from tests.helpers import checkpoint, ranks, records, refused, run_distributed, succeeded, tiny
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import CheckpointError, UnreadableError


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_disk_error_is_not_damage(name: str, tmp_path: Path) -> None:
    folder = storage.commit(storage.new_folder(tmp_path, 4), TrainState(step=4), "full", 1, {})
    (folder / name).unlink()
    (folder / name).symlink_to("/proc/self/mem")  # reading its first byte is an I/O error
    with pytest.raises(UnreadableError, match=f"{folder / name} can't be read: Input/output error"):
        storage.read_state(folder)


@pytest.mark.extended
def test_a_run_stops_on_every_rank_and_moves_nothing(text: Path, tmp_path: Path) -> None:
    command = tiny(text, tmp_path, run__name="run", train__steps=4, checkpoint__every=2, eval__every=0)
    succeeded(ranks(2, *command))
    result = ranks(2, *command, "--train.steps=6", fault="eio:1:0:hash")
    refused(result, f"{checkpoint(tmp_path / 'run', 4)}", "can't be read: Input/output error", code=1)
    assert sorted(os.listdir(tmp_path / "run/checkpoints")) == ["step-00000002", "step-00000004"]
    assert "resumed after step 4" in succeeded(ranks(2, *command, "--train.steps=6"))


def test_a_committed_save_is_reported_as_saved_though_retention_fails(text: Path, tmp_path: Path) -> None:
    """All ranks agree on it: otherwise rank 0 alone would stop after the last one."""
    more = {"train__steps": 4, "checkpoint__every": 2, "eval__every": 0, "checkpoint__keep_latest": 1}
    command = tiny(text, tmp_path, run__name="run", **more)
    output = succeeded(ranks(2, *command, fault="error:0:2:after rename:2"))
    assert "NOT SAVED" not in output
    assert "step-00000004  (" in output
    notes = (line for line in output.splitlines() if line.startswith("note    older"))
    assert ["No space left on device" in line for line in notes] == [True, True]
    assert [r["step"] for r in records(tmp_path / "run") if "save_s" in r] == [2, 4]
    assert storage.find_steps(tmp_path / "run/checkpoints") == [2, 4]


def load_damaged(process: Process, folder: Path, kind: str, api: str) -> None:
    """On two copies of two ranks, with `verify = "off"`."""
    state = State("2x2", 1, "tiny", process)
    state.step()
    folder = save_now(state.checkpointer(folder, kind, api))
    file, loader = folder / FILES[kind], state.checkpointer(folder.parent, kind, api)
    loader.config = loader.config.model_copy(update={"verify": "off"})
    for damaged in (file.read_bytes()[:-9], file.read_bytes()[:99]):
        torch.distributed.barrier()
        if process.rank == 0:
            file.write_bytes(damaged)
        torch.distributed.barrier()
        with pytest.raises(CheckpointError, match=str(folder)):
            loader.load({})


FILES = {"full": storage.OPTIMIZER, "sharded": "shard-00003-of-00004.safetensors"}


@pytest.mark.parametrize(("kind", "api"), [("full", "dtensor"), ("sharded", "dcp")])
def test_without_hashes_a_cut_file_is_named_on_every_rank(kind: str, api: str, tmp_path: Path) -> None:
    run_distributed(load_damaged, 4, tmp_path, kind, api)
