"""While rank 0's disk takes longer than a collective may, the other ranks wait, and no collective is pending."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpointing.reload_worker import State, save_now
from tests.helpers import run_distributed
from torchtitan_lite.checkpointing import safetensors_file, shards, storage, tensor_names
from torchtitan_lite.distributed.process_group import Process, set_group_timeouts

COLLECTIVE_S, DISK_S = 1.0, 3.0


def slow(real: Callable[..., Any]) -> Callable[..., Any]:
    """A function of rank 0's disk that is slow at first."""
    calls = itertools.count()

    def call(*args: Any) -> Any:
        if next(calls) == 0:
            time.sleep(DISK_S)
        return real(*args)

    return call


def save_and_load_slowly(process: Process, folder: Path) -> bool:
    state = State("2", 1, "llama", process)
    state.step()
    saver = state.checkpointer(folder, "full", "dtensor")
    set_group_timeouts(COLLECTIVE_S / 60)
    safetensors_file.TensorWriter.write = slow(safetensors_file.TensorWriter.write)  # type: ignore[method-assign]
    saved = save_now(saver)

    before = state.whole()
    state.step()
    vars(shards)["open_tensors"] = slow(storage.open_tensors)
    tensor_names.GROUP_BYTES = 1  # each tensor alone
    saver.load_tensors(saved)
    dist.barrier(group=process.untimed)
    return all(tensor.equal(before[name]) for name, tensor in state.whole().items())


@pytest.mark.extended
def test_a_slow_disk_keeps_the_others_waiting_without_collectives(tmp_path: Path) -> None:
    """Three seconds, after one of which a collective fails."""
    assert all(run_distributed(save_and_load_slowly, 2, tmp_path))
