"""While rank 0's disk takes longer than a collective may, the other ranks wait, and no collective is pending."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpoint import Checkpointer
from tests.checkpointing.reload_worker import save_now
from tests.distributed.distributed_cases import MESHES, make_mesh, sharded
from tests.helpers import run_distributed
from torchtitan_lite.checkpointing import full_state, safetensors_file, storage
from torchtitan_lite.config.schema import CheckpointConfig, ModelConfig, OptimConfig
from torchtitan_lite.distributed.process_group import Process, set_group_timeouts
from torchtitan_lite.optim.optimizer import build_optimizer, make_state
from torchtitan_lite.tools.dry_run import peak_of

MODEL = ModelConfig(family="gpt", dim=256, n_heads=2, n_layers=1, max_seq_len=3)  # its largest tensor: 517 x 256
CHUNK_BYTES = 100_000  # bytes; no multiple of a row
COLLECTIVE_S, DISK_S = 1.0, 3.0


class SlowDisk:
    """A function of rank 0's disk: slow once, and it notes how many timed collectives rank 1 has begun meanwhile."""

    def __init__(self, process: Process, real: Any) -> None:
        self.process, self.real, self.calls, self.ahead = process, real, 0, 0
        self.store = dist.distributed_c10d._get_default_store()

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            time.sleep(DISK_S)
            self.ahead = self.store.add(self.key(1), 0) - self.store.add(self.key(0), 0)
        return self.real(*args)

    def key(self, rank: int) -> str:
        return f"collectives of rank {rank} in {self.real.__name__}"

    def counted(self, collective: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            if not any(arg is self.process.untimed for arg in args):
                self.store.add(self.key(self.process.rank), 1)
            return collective(*args, **kwargs)

        return counting


def save_and_load_slowly(process: Process, folder: Path) -> dict[str, Any]:
    model = sharded(make_mesh(MESHES["2"]), family=MODEL, seed=process.world_size)
    optimizer = build_optimizer(model, OptimConfig(name="adamw"))
    make_state(optimizer)
    saver = Checkpointer(folder, model, optimizer, CheckpointConfig(), process)
    set_group_timeouts(COLLECTIVE_S / 60)

    write = SlowDisk(process, safetensors_file.HashingStream.write)
    safetensors_file.HashingStream.write = lambda *args: write(*args)  # type: ignore[method-assign]
    DTensor.full_tensor = write.counted(DTensor.full_tensor)  # type: ignore[method-assign]
    saved = save_now(saver)

    parameters = [parameter.detach().to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
    before = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.zero_()
    opened: Any = storage.open_tensors

    def get_tensor(file: Path, name: str) -> Tensor:
        tensor: Tensor = opened(file).get_tensor(name)
        return tensor

    read = SlowDisk(process, get_tensor)

    class Slow:
        def __init__(self, file: Path) -> None:
            self.get_tensor = lambda name: read(file, name)

    full_state.CHUNK_BYTES = CHUNK_BYTES
    for name in ("broadcast", "scatter"):
        setattr(dist, name, read.counted(getattr(dist, name)))
    storage.open_tensors = lambda file: Slow(file)
    peak = peak_of(lambda: saver.load_tensors(saved))
    dist.barrier(group=process.untimed)
    return {
        "save ahead": write.ahead,
        "load ahead": read.ahead,
        "load peak": peak,
        "equal": all(parameter.equal(old) for parameter, old in zip(parameters, before, strict=True)),
        "largest": max(p.numel() for p in model.parameters()) * torch.float32.itemsize,
    }


@pytest.mark.extended
def test_a_slow_disk_keeps_the_others_waiting_without_collectives(tmp_path: Path) -> None:
    """Three seconds, where a collective may take one. Loading takes a chunk, whatever the size of a tensor."""
    on_rank = run_distributed(save_and_load_slowly, 2, tmp_path)
    assert on_rank[0]["save ahead"] == on_rank[0]["load ahead"] == 0
    assert all(result["equal"] for result in on_rank)
    # a buffer for each of two files: gloo's thread may free the first one late
    assert on_rank[1]["load peak"] < 2 * CHUNK_BYTES + 20_000 < on_rank[1]["largest"] / 2
