"""Steps of optim.rms_scaling with given gradients on any mesh: rank 0 writes whole tensors to OUT.

    OUT MESH STEPS [SKIPPED]

The gradients are the same on every mesh. SKIPPED is a step whose update is withheld.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.checkpointing.reload_worker import MESHES
from tests.optim.muon_worker import MODEL
from torchtitan_lite.config.schema import FsdpConfig, OptimConfig, RunConfig
from torchtitan_lite.distributed.initialize import materialise
from torchtitan_lite.distributed.parallelize import apply_fsdp
from torchtitan_lite.distributed.process_group import exit_process, process_group
from torchtitan_lite.models import build
from torchtitan_lite.optim.optimizer import build_optimizer, set_learning_rate

SCALE = 2.0  # of the gradients, as with float16
GROUPS = [{"match": "layers.1.*", "lr_factor": 0.5, "weight_decay": 0.3}]
VALUES: dict[str, Any] = {
    **{"name": "adamw", "rms_scaling": True, "weight_decay": 0.1, "groups": GROUPS, "lr": 0.02, "eps": 1e-6}
}


def gradient(step: int, number: int, shape: Any) -> Tensor:
    """The gradient of a parameter, by its number in the model."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + number))


def main(argv: Sequence[str]) -> int:
    out, mesh_name, steps, *skipped = argv
    with process_group(RunConfig(device="cpu", threads=1)) as world:
        n, copies = MESHES[mesh_name]
        mesh = init_device_mesh("cpu", (copies, n // copies), mesh_dim_names=("dp_replicate", "dp_shard"))
        with torch.device("meta"):
            model = build(MODEL, 517)
        apply_fsdp(model, mesh if copies > 1 else mesh["dp_shard"], FsdpConfig())
        materialise(model, world.device, seed=1)
        with torch.no_grad():
            model.get_parameter("layers.0.attention.wq.weight").zero_()  # it takes the least rate
        optimizer: Any = build_optimizer(model, OptimConfig.model_validate(VALUES))
        set_learning_rate(optimizer, VALUES["lr"])
        found = {f"before.{name}": whole(p) for name, p in model.named_parameters()}
        calls = counted()
        for step in range(1, int(steps) + 1):
            for i, p in enumerate(model.parameters()):
                grad = gradient(step, i, p.shape) * SCALE
                if str(step) in skipped:
                    grad[0] = torch.nan
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
            optimizer.grad_scale = torch.tensor(SCALE)
            optimizer.found_inf = torch.tensor(float(str(step) in skipped))
            optimizer.step()
            optimizer.zero_grad()
        n_calls = len(calls)
        for name, p in model.named_parameters():
            found |= {f"weight.{name}": whole(p)}
            found |= {f"{kind}.{name}": whole(value) for kind, value in optimizer.state[p].items()}
        if world.rank == 0:
            save_file(found | {"calls": torch.tensor(n_calls)}, Path(out))
    return 0


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous().clone()


def counted() -> list[int]:
    """The numbers of elements of every all-reduce from now on."""
    plain: Any = dist.all_reduce
    calls: list[int] = []

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    return calls


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
