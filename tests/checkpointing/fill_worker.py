"""Two ranks save and load a full checkpoint, while rank 0's disk takes longer than a collective may: `FOLDER`."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import checkpoint
from tests.distributed.distributed_cases import MESHES, make_mesh, sharded
from torchtitan_lite.checkpointing import full_state, safetensors_file, storage
from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.schema import CheckpointConfig, ModelConfig, OptimConfig, RunConfig
from torchtitan_lite.distributed.process_group import World, limit_group_timeouts, process_group
from torchtitan_lite.optim.optimizer import build_optimizer, make_state
from torchtitan_lite.tools.allocator import peak_of

MODEL = ModelConfig(family="gpt", dim=256, n_heads=2, n_layers=1, max_seq_len=3)  # its largest tensor: 517 x 256
PIECE = 100_000  # bytes; no multiple of a row
COLLECTIVE_S, DISK_S = 1.0, 3.0


class SlowDisk:
    """A function of rank 0's disk: slow once, and it notes how many collectives rank 1 has begun meanwhile."""

    def __init__(self, world: World, real: Any) -> None:
        self.world, self.real, self.calls, self.ahead = world, real, 0, 0
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
            self.store.add(self.key(self.world.rank), 1)
            return collective(*args, **kwargs)

        return counting


def main(argv: Sequence[str]) -> int:
    found: dict[str, Any] = {}
    with process_group(RunConfig(device="cpu", threads=1, timeout_minutes=5)) as world:
        model = sharded(make_mesh(MESHES["2"]), family=MODEL, seed=world.world_size)
        optimizer = build_optimizer(model, OptimConfig(name="adamw"))
        make_state(optimizer)
        saver = checkpoint.Checkpointer(Path(argv[0]), model, optimizer, CheckpointConfig(), world)
        limit_group_timeouts(COLLECTIVE_S / 60)

        write = SlowDisk(world, safetensors_file.TensorFileWriter.write)
        safetensors_file.TensorFileWriter.write = lambda *args: write(*args)  # type: ignore[method-assign]
        DTensor.full_tensor = write.counted(DTensor.full_tensor)  # type: ignore[method-assign]
        saver.save(TrainState(step=1))
        saved = saver.wait()
        assert saved is not None
        assert not saved.error, saved.error
        found["save ahead"] = write.ahead

        parameters = list(model.parameters())
        before = [p.detach().to_local().clone() for p in parameters]  # type: ignore[attr-defined]
        for parameter in parameters:
            parameter.detach().to_local().zero_()  # type: ignore[attr-defined]
        opened: Any = storage.open_tensors

        def get_tensor(file: Path, name: str) -> Tensor:
            tensor: Tensor = opened(file).get_tensor(name)
            return tensor

        read = SlowDisk(world, get_tensor)

        class Slow:
            def __init__(self, file: Path) -> None:
                self.get_tensor = lambda name: read(file, name)

        folder = storage.step_folder(Path(argv[0]), 1)
        manifest = storage.read_manifest(folder)
        full_state.PIECE = PIECE
        for name in ("broadcast", "scatter"):
            setattr(dist, name, read.counted(getattr(dist, name)))
        storage.open_tensors = lambda file: Slow(file)
        found["load peak"] = peak_of(lambda: saver.load_tensors(folder, manifest))
        found["load ahead"] = read.ahead
        same = zip(parameters, before, strict=True)
        found["equal"] = all(p.detach().to_local().equal(old) for p, old in same)  # type: ignore[attr-defined]
        found["largest"] = max(p.numel() for p in parameters) * torch.float32.itemsize
        Path(argv[0], f"rank-{world.rank}.json").write_text(json.dumps(found))
        dist.barrier(group=world.untimed)
    return 0
