"""Steps of every optimizer with optim.ema_decay on any mesh; each rank compares its rows with the formula: OUT MESH.

The gradients are the same on every mesh. The updates of the steps in WITHHELD are withheld, by the guard of a run. Rank
0 writes the bytes of its optimizer state to OUT, as JSON.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.checkpointing.reload_worker import MESHES
from tests.optim.muon_worker import MODEL
from torchtitan_lite.config.schema import FsdpConfig, GradScalerConfig, OptimConfig, RunConfig
from torchtitan_lite.distributed.initialize import materialise
from torchtitan_lite.distributed.parallelize import apply_fsdp
from torchtitan_lite.distributed.process_group import exit_process, process_group
from torchtitan_lite.distributed.sharding import local_rows
from torchtitan_lite.models import build
from torchtitan_lite.optim.finite_guard import FiniteGuard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.optimizer import build_optimizer, freeze, set_learning_rate
from torchtitan_lite.tools.allocator import own_bytes

STEPS, WITHHELD = 4, (3,)  # not the second: until then the average is the weight
DECAY = 0.8
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, rms_scaling": {"rms_scaling": True},
    "sgd": {"name": "sgd"},
    "muon": {"name": "muon"},
}
TIED = MODEL.model_copy(update={"tie_embeddings": True, "n_layers": 2})
FROZEN = "layers.1.*"


def after(mean: Tensor, weight: Tensor, step: int) -> Tensor:
    """The average after a step, from the one before it."""
    return weight if step == 1 else mean + (weight - mean) * ((1 - DECAY) / (1 - DECAY**step))


def main(argv: Sequence[str]) -> int:
    out, mesh_name = argv
    found = {}
    with process_group(RunConfig(device="cpu", threads=1)) as world:
        n, copies = MESHES[mesh_name]
        mesh = init_device_mesh("cpu", (copies, n // copies), mesh_dim_names=("dp_replicate", "dp_shard"))
        for label, values in OPTIMIZERS.items():
            with torch.device("meta"):
                model = build(TIED, 517)
            freeze(model, [FROZEN])
            apply_fsdp(model, mesh if copies > 1 else mesh["dp_shard"], FsdpConfig())
            materialise(model, world.device, seed=1)
            config = OptimConfig.model_validate({"freeze": [FROZEN], "ema_decay": DECAY} | values)
            optimizer = build_optimizer(model, config)
            set_learning_rate(optimizer, 0.01)
            guard = FiniteGuard(optimizer, GradScaler(GradScalerConfig(), False, world.device), max_skipped=1)
            parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
            assert 0 < len(parameters) < len(list(model.parameters()))
            expected: dict[str, Tensor] = {}
            for step in range(1, STEPS + 1):
                before = {name: local_rows(p)[0].clone() for name, p in parameters.items()}
                for i, p in enumerate(parameters.values()):
                    whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
                    if step in WITHHELD:
                        whole[0] = torch.nan
                    p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole
                guard.update(step, torch.full((n,), math.nan if step in WITHHELD else 1.0), torch.tensor(1.0))
                guard.check()
                for name, p in parameters.items():
                    weight, ema = local_rows(p)[0], optimizer.state[p]["ema"]
                    if step in WITHHELD:
                        assert weight.equal(before[name])
                    else:
                        assert not weight.numel() or not weight.equal(before[name])
                        expected[name] = after(expected.get(name, weight), weight, step).clone()
                    assert isinstance(ema, DTensor) == isinstance(p, DTensor)
                    assert ema.shape == p.shape
                    assert local_rows(ema)[0].equal(expected[name]), f"{label}, step {step}, {name}"
            assert len(optimizer.state) == len(parameters)
            found[label] = own_bytes(value for state in optimizer.state.values() for value in state.values())
        if world.rank == 0:
            Path(out).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
