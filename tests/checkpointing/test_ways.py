"""The four ways of saving, in the background, with retention, and on machines that share no disk."""

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.checkpointing.reload_worker import WAYS, State, save_now, saved_folder
from tests.helpers import run_distributed
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import CheckpointError, SaveError
from torchtitan_lite.huggingface.weights import read_weights

# --- background saves -------------------------------------------------------------------------------------------


def train_while_saving(process: Process, folder: Path, mesh: str) -> None:
    """Nothing is written before training has taken a step more; then the bytes have to be those of the first step."""
    trained = threading.Event()
    new_folder = storage.new_folder

    def begin_after_training(*args: Any, **kwargs: Any) -> Path:
        assert trained.wait(60)
        return new_folder(*args, **kwargs)

    for kind, api in WAYS:
        state = State(mesh, 1, "llama", process)
        state.step()
        saves = {}
        for background in (False, True):
            checkpointer = state.checkpointer(folder / f"{kind} {api} {background}", kind, api, async_save=background)
            with pytest.MonkeyPatch.context() as patched:
                if background:
                    trained.clear()
                    patched.setattr(storage, "new_folder", begin_after_training)
                checkpointer.save(TrainState(step=1))
                if background:
                    before = state.whole()
                    state.step()
                    same = [name for name, tensor in state.whole().items() if tensor.equal(before[name])]
                    assert not same, f"the step did not change {same}, so nothing is tested of them"
                    trained.set()
                saves[background] = storage.read_manifest(saved_folder(checkpointer)).files
        assert saves[True] == saves[False], f"{kind} {api}: another step, or bytes of two"


@pytest.mark.parametrize(("mesh", "world_size"), [("1", 1), ("3c", 3)])
def test_a_background_save_holds_the_state_of_its_step(mesh: str, world_size: int, tmp_path: Path) -> None:
    """On one rank as well: there, torch's functions return the live tensors."""
    run_distributed(train_while_saving, world_size, tmp_path, mesh)


# --- retention --------------------------------------------------------------------------------------------------


def save_after_a_load(process: Process, folder: Path) -> list[list[int]]:
    """The steps that were there after each save, and those among which the best one was asked for."""
    state, best_of = State("1", 1, "llama", process), Mock(return_value=4)
    options = {"keep_latest": 2, "keep_every": 7, "keep_best": True}
    first, second = (state.checkpointer(folder, "full", "dtensor", **options) for _ in range(2))
    first.best_of = second.best_of = best_of

    def save(saver: Checkpointer, step: int) -> list[int]:
        save_now(saver, step)
        return storage.find_steps(folder)

    state.step()
    kept = [save(first, step) for step in (1, 2, 3)]
    with pytest.raises(CheckpointError, match="belongs to a different model or optimizer"):
        State("1", 1, "t5", process).checkpointer(folder, "full", "dtensor").load({})
    for step in (6, 8):
        damaged = shutil.copytree(storage.step_folder(folder, 3), storage.step_folder(folder, step))
        (damaged / storage.MODEL).write_bytes(b"")
    assert (second.load({}), second.damaged) == (TrainState(step=3), [8, 6])
    kept += [save(second, step) for step in (4, 6, 7, 9, 10)]
    return kept + [asked.args[1] for asked in best_of.call_args_list]


def test_retention_keeps_the_newest_each_seventh_the_best_and_the_loaded_checkpoint(tmp_path: Path) -> None:
    """The loaded one, of step 3, until a person has seen that the run continues well from it. The damaged ones of the
    steps 6 and 8 count for nothing: 6 is replaced, 8 is deleted by the next later save. The best is that of step 4.
    """
    kept = [[1], [1, 2], [2, 3], [3, 4, 6, 8], [3, 4, 6, 8], [3, 4, 6, 7, 8], [3, 4, 7, 9], [3, 4, 7, 9, 10]]
    asked = [[1], [1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 6], [3, 4, 6, 7], [3, 4, 6, 7, 9], [3, 4, 7, 9, 10]]
    assert run_distributed(save_after_a_load, 1, tmp_path) == [kept + asked]


def disk(n_bytes: int) -> Any:
    """With so many bytes free."""
    return mock.patch("os.statvfs", return_value=os.statvfs_result((1, 1, 0, 0, n_bytes, 0, 0, 0, 0, 0)))


def save_on_a_full_disk(process: Process, folder: Path) -> list[int]:
    """Room for half a checkpoint; and before the first step, for one and a half times the weights."""
    state = State("1", 1, "llama", process)
    saver = state.checkpointer(folder, "full", "dtensor", keep_latest=1)
    weights = sum(parameter.nbytes for parameter in state.model.parameters())
    with disk(weights * 3 // 2), pytest.raises(SaveError, match="a checkpoint takes"):
        saver.require_space()
    state.step()
    saver.require_space()
    used = sum(file.stat().st_size for file in save_now(saver, 1).iterdir())
    with disk(used // 2):
        with pytest.raises(SaveError, match=rf"a checkpoint takes .*iB, but {folder} has only .*iB free: free some"):
            saver.require_space()
        with pytest.raises(AssertionError, match="a checkpoint takes"):
            save_now(saver, 2)
    left = folder / ".tmp-step-00000002-killed"
    left.mkdir()
    full, free = (os.statvfs_result((1, 1, 0, 0, n, 0, 0, 0, 0, 0)) for n in (0, 2 * used))
    with mock.patch("os.statvfs", side_effect=lambda _: full if left.exists() else free):
        save_now(saver, 2)  # what a killed save has left is no longer there
    return storage.find_steps(folder)


def test_without_room_for_a_checkpoint_neither_a_run_nor_a_save_begins(tmp_path: Path) -> None:
    assert run_distributed(save_on_a_full_disk, 1, tmp_path) == [[2]]


# --- machines that share no disk --------------------------------------------------------------------------------


def on_two_machines(process: Process, folder: Path, api: str, mesh: str, background: bool) -> None:
    """Save three steps; then resume from the newest, and as a fork; then start from the weights."""
    process = replace(process, local_world_size=2)
    disk = folder / f"disk{process.rank // 2}"
    run = disk / "run"
    state = State(mesh, 1, "llama", process)
    saver = state.checkpointer(run, "full", api, async_save=background, keep_latest=2)
    expected: dict[int, dict[str, Tensor]] = {}
    for step in (1, 2, 3):
        state.step()
        expected[step] = state.whole()
        newest = save_now(saver, step) / storage.MODEL

    def require_loaded(step: int, damaged: list[int], folder: Path, **more: Any) -> None:
        fresh = State(mesh, 2, "llama", process)
        loader = fresh.checkpointer(folder, "full", api, **more)
        assert (loader.load({}), loader.damaged) == (TrainState(step=step), damaged)
        loaded = fresh.whole()
        assert [name for name, tensor in expected[step].items() if not loaded[name].equal(tensor)] == []

    require_loaded(3, [], run)
    require_loaded(3, [], disk / "fork", resume=str(run))
    torch.distributed.barrier()
    if process.rank == 0:
        newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    torch.distributed.barrier()
    require_loaded(2, [3], run)
    require_loaded(2, [], disk / "fork", resume=str(run))
    # model.init_from: the weights alone
    fresh = State(mesh, 2, "llama", process)
    loader = fresh.checkpointer(disk / "new", "full", api)
    loader.load_weights(lambda: (storage.step_folder(run, 2), []), read_weights)
    loaded = fresh.whole()
    assert all(loaded[name].equal(tensor) for name, tensor in expected[2].items() if name.startswith("model."))


@pytest.mark.parametrize(("api", "mesh", "background"), [("dtensor", "4", True), ("dcp", "2x2", False)])
def test_full_checkpoints_need_only_the_disk_of_the_first_machine(
    api: str, mesh: str, background: bool, tmp_path: Path
) -> None:
    """Two machines of two ranks, each with a folder of its own."""
    for machine in (0, 1):
        (tmp_path / f"disk{machine}").mkdir()
    run_distributed(on_two_machines, 4, tmp_path, api, mesh, background)
    assert list((tmp_path / "disk1").iterdir()) == []
