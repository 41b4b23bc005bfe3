"""While rank 0's disk takes longer than a collective may, the other ranks wait, and no collective is pending."""

import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from checkpoint import WAYS
from tests.checkpointing.reload_worker import save_now
from tests.distributed.distributed_cases import MESHES, make_mesh, sharded
from tests.helpers import run_distributed
from torchtitan_lite.checkpointing import safetensors_file, shards, storage, tensor_names
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.config.schema import CheckpointConfig, ModelConfig, OptimConfig
from torchtitan_lite.distributed.process_group import Process, set_group_timeouts
from torchtitan_lite.optim.optimizer import build_optimizer, make_state

MODEL = ModelConfig(family="gpt", dim=256, n_heads=2, n_layers=1, max_seq_len=3)
COLLECTIVE_S, DISK_S = 1.0, 3.0


def slow(real: Callable[..., Any]) -> Callable[..., Any]:
    """A function of rank 0's disk that is slow once."""
    calls = itertools.count()

    def call(*args: Any) -> Any:
        if next(calls) == 2:
            time.sleep(DISK_S)
        return real(*args)

    return call


def save_and_load_slowly(process: Process, folder: Path) -> bool:
    model = sharded(make_mesh(MESHES["2"]), family=MODEL, seed=process.world_size)
    optimizer = build_optimizer(model, OptimConfig(name="adamw"))
    make_state(optimizer)
    saver = Checkpointer(folder, model, optimizer, CheckpointConfig(), process, WAYS)
    set_group_timeouts(COLLECTIVE_S / 60)
    safetensors_file.TensorWriter.write = slow(safetensors_file.TensorWriter.write)  # type: ignore[method-assign]
    saved = save_now(saver)

    parameters = [parameter.detach().to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    before = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.zero_()
    opened: Any = storage.open_tensors
    read = slow(lambda file, name: opened(file).get_tensor(name))
    vars(shards)["open_tensors"] = lambda file: SimpleNamespace(get_tensor=functools.partial(read, file))
    tensor_names.GROUP_BYTES = 1  # each tensor alone
    saver.load_tensors(saved)
    dist.barrier(group=process.untimed)
    return all(parameter.equal(old) for parameter, old in zip(parameters, before, strict=True))


@pytest.mark.extended
def test_a_slow_disk_keeps_the_others_waiting_without_collectives(tmp_path: Path) -> None:
    """Three seconds, after one of which a collective fails."""
    assert all(run_distributed(save_and_load_slowly, 2, tmp_path))
