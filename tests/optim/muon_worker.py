"""Steps of Muon with given gradients on any mesh: rank 0 writes whole parameters and momenta to OUT.

    OUT MESH [SKIPPED]

The gradients are the same on every mesh. SKIPPED is a step whose update is withheld.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.checkpointing.reload_worker import MESHES
from torchtitan_lite.config.schema import FsdpConfig, ModelConfig, OptimConfig, RunConfig
from torchtitan_lite.distributed.initialize import materialise
from torchtitan_lite.distributed.parallelize import apply_fsdp
from torchtitan_lite.distributed.process_group import exit_process, process_group
from torchtitan_lite.models import build
from torchtitan_lite.optim.muon import Muon
from torchtitan_lite.optim.optimizer import build_optimizer, set_learning_rate
from torchtitan_lite.tools.allocator import own_bytes

# rows of 30, 10 and 3 divide by neither 2 nor 4, and of 3 one of four ranks has none
MODEL = ModelConfig(family="llama", dim=30, n_heads=3, n_kv_heads=1, hidden_dim=3, n_layers=5, max_seq_len=8)
STEPS = 3


def main(argv: Sequence[str]) -> int:
    out, mesh_name, *skipped = argv
    with process_group(RunConfig(device="cpu", threads=1)) as world:
        n, copies = MESHES[mesh_name]
        mesh = init_device_mesh("cpu", (copies, n // copies), mesh_dim_names=("dp_replicate", "dp_shard"))
        with torch.device("meta"):
            model = build(MODEL, 517)
        apply_fsdp(model, mesh if copies > 1 else mesh["dp_shard"], FsdpConfig())
        materialise(model, world.device, seed=1)
        optimizer = build_optimizer(model, OptimConfig(name="muon", weight_decay=0.1))
        assert isinstance(optimizer, Muon)
        set_learning_rate(optimizer, 0.01)
        calls = counted()
        for step in range(1, STEPS + 1):
            for i, p in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * step + i)
                whole = torch.randn(p.shape, generator=generator)
                if str(step) in skipped:
                    whole[0] = torch.nan
                p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole
            optimizer.grad_scale = torch.tensor(2.0)
            optimizer.found_inf = torch.tensor(float(str(step) in skipped))
            optimizer.step()
            optimizer.zero_grad()
        found = {}
        for name, p in model.named_parameters():
            tensors = {"weight": p, "momentum": optimizer.state[p].get("momentum_buffer")}
            for kind, tensor in tensors.items():
                if tensor is not None:
                    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                    found[f"{kind}.{name}"] = whole.detach().contiguous().clone()
        # the first of the two exchanges of a shape brings whole matrices to their owners
        by_rank = torch.zeros(2, n, dtype=torch.int64)
        by_rank[0, world.rank] = sum(calls[::2]) // STEPS
        by_rank[1, world.rank] = own_bytes(value for state in optimizer.state.values() for value in state.values())
        if n > 1:
            dist.all_reduce(by_rank)
        if world.rank == 0:
            more = {"calls": torch.tensor(len(calls)), "owned": by_rank[0].clone(), "state": by_rank[1].clone()}
            save_file(found | more, Path(out))
    return 0


def counted() -> list[int]:
    """A list to which every all-to-all from now on adds the bytes that it brings to this rank."""
    plain: Any = dist.all_to_all_single
    calls: list[int] = []

    def exchange(received: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(received.nbytes)
        return plain(received, *args, **kwargs)

    dist.all_to_all_single = exchange  # type: ignore[assignment]
    return calls


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
