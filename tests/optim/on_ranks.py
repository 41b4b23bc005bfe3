"""For `run_distributed`: steps of the optimizers with given gradients on any mesh, and loads of their averages.

The gradients are the same on every mesh.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.checkpointing.reload_worker import MESHES, WAYS, State, fsdp, saved_folder
from tests.distributed.distributed_cases import make_mesh, sharded
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import FsdpConfig, ModelConfig, OptimConfig
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.models import Transformer
from torchtitan_lite.optim.guarded import set_learning_rate
from torchtitan_lite.optim.optimizer import build_optimizer
from torchtitan_lite.tools.dry_run import own_bytes

# rows of 30 and 10 do not divide by 4, and of one row all ranks but one of each copy have none
MODEL = ModelConfig(family="llama", dim=30, n_heads=3, n_kv_heads=1, hidden_dim=1, n_layers=5, max_seq_len=8)


def on_mesh(mesh: str, config: ModelConfig, frozen: Sequence[str] = ()) -> Transformer:
    """The same model on any mesh."""
    n, copies = MESHES[mesh]
    device_mesh = make_mesh(torch.arange(n).view(copies, -1) if copies > 1 else torch.arange(n))
    return sharded(device_mesh, FsdpConfig(**fsdp(mesh)), 1, config, frozen)


def give_gradients(parameters: Iterable[nn.Parameter], step: int, *, nan: bool) -> None:
    """Give this rank's rows of their gradients to the parameters; with `nan`, the first row of each is NaN."""
    for i, p in enumerate(parameters):
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        if nan:
            grad[0] = torch.nan
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous().clone()


# --- Muon -------------------------------------------------------------------------------------------------------


def muon_update(momentum: Tensor, gradient: Tensor, share: float) -> Tensor:
    """Jordan's algorithm by singular values, in float64, of a matrix or of each in a stack. Changes the momentum."""
    momentum.mul_(share).add_((1 - share) * gradient)
    nesterov = share * momentum + (1 - share) * gradient
    u, s, v = torch.linalg.svd(nesterov, full_matrices=False)
    s = s / nesterov.norm(dim=(-2, -1))[..., None]
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s[..., None, :]) @ v


def muon(process: Process, mesh: str, withheld: Sequence[int]) -> list[dict[str, Tensor]]:
    """For each step that may be withheld: whole parameters and momenta after three steps, and figures of this rank."""
    results = []
    for not_this in withheld:
        model = on_mesh(mesh, MODEL)
        optimizer = build_optimizer(model, OptimConfig(name="muon", weight_decay=0.1))
        set_learning_rate(optimizer, 0.01)
        with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
            for step in range(1, 4):
                give_gradients(model.parameters(), step, nan=step == not_this)
                optimizer.grad_scale = torch.tensor(2.0)  # as with float16
                optimizer.found_inf = torch.tensor(float(step == not_this))
                optimizer.step()
                optimizer.zero_grad()
        found = {f"weight.{name}": whole(p) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            if "momentum_buffer" in optimizer.state[p]:
                found[f"momentum.{name}"] = whole(optimizer.state[p]["momentum_buffer"])
        state = own_bytes(value for state in optimizer.state.values() for value in state.values())
        received = [call.args[0].nbytes for call in exchange.call_args_list]
        # the first of the two exchanges of a shape brings whole matrices to their owners
        figures = {"calls": len(received), "owned": sum(received[::2]) // 3, "state": state}
        results.append(found | {key: torch.tensor(value) for key, value in figures.items()})
    return results


# --- optim.ema_decay --------------------------------------------------------------------------------------------

# step -> loss of the last rank; the update is withheld. Not the second: until then the average is the weight
STEPS, WITHHELD = 5, {3: math.nan, 4: math.inf}
DECAY = 0.8
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"name": "sgd"},
    "muon": {"name": "muon"},
}
TIED = MODEL.model_copy(update={"tie_embeddings": True, "n_layers": 2})
FROZEN = "layers.1.*"


def after(mean: Tensor, weight: Tensor, step: int) -> Tensor:
    """The average after a step, from the one before it."""
    return weight if step == 1 else mean + (weight - mean) * ((1 - DECAY) / (1 - DECAY**step))


def follow_averages(process: Process, mesh: str) -> dict[str, int]:
    """Compare this rank's rows with the formula after each step of every optimizer. Returns the bytes of its state.

    The updates of the steps in WITHHELD are withheld.
    """
    found = {}
    for label, values in OPTIMIZERS.items():
        model = on_mesh(mesh, TIED, [FROZEN])
        config = OptimConfig.model_validate({"freeze": [FROZEN], "ema_decay": DECAY} | values)
        optimizer = build_optimizer(model, config)
        set_learning_rate(optimizer, 0.01)
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert 0 < len(parameters) < len(list(model.parameters()))
        expected: dict[str, Tensor] = {}
        for step in range(1, STEPS + 1):
            before = {name: own_part(p)[0].clone() for name, p in parameters.items()}
            give_gradients(parameters.values(), step, nan=step in WITHHELD and math.isnan(WITHHELD[step]))
            optimizer.update(step, 0.01, torch.ones(()), torch.tensor(step in WITHHELD))
            for name, p in parameters.items():
                weight, ema = own_part(p)[0], optimizer.state[p]["ema"]
                if weight.numel():
                    assert weight.equal(before[name]) == (step in WITHHELD)
                if step not in WITHHELD:
                    expected[name] = after(expected.get(name, weight), weight, step).clone()
                assert isinstance(ema, DTensor) == isinstance(p, DTensor)
                assert ema.shape == p.shape
                assert own_part(ema)[0].equal(expected[name]), f"{label}, step {step}, {name}"
        assert len(optimizer.state) == len(parameters)
        found[label] = own_bytes(value for state in optimizer.state.values() for value in state.values())
    return found


DECAYS = 0.0, DECAY


def averaging(decay: float, seed: int, process: Process) -> State:
    """A model and an optimizer with, or without, averages."""
    state = State(str(process.world_size), seed, "llama", process)
    state.optimizer = build_optimizer(state.model, OptimConfig(name="muon", ema_decay=decay))
    return state


def load_averages(process: Process, folder: Path) -> None:
    """Load checkpoints with and without averages into optimizers with and without them, in all four ways."""
    sources = {saved: averaging(saved, 1, process) for saved in DECAYS}
    for source in (*sources.values(), *sources.values()):
        source.step()  # twice: after the first step, the average is the weight
    for (kind, api), (saved, source) in itertools.product(WAYS, sources.items()):
        run, expected = folder / f"{kind} {api} {saved}", source.whole()
        checkpointer = source.checkpointer(run, kind, api)
        checkpointer.save(TrainState(step=2, config={"optim.ema_decay": saved}))
        saved_folder(checkpointer)
        for now in DECAYS:
            target = averaging(now, 2, process)
            assert target.checkpointer(run, kind, api).load({}) is not None
            found = target.whole()
            wanted = {name: tensor for name, tensor in expected.items() if now or not name.endswith(".ema")}
            if now and not saved:  # a new average starts from the weights
                wanted |= {
                    f"optimizer.state.{n}.ema": expected[f"model.{n}"] for n, _ in target.model.named_parameters()
                }
            assert found.keys() == wanted.keys(), f"{run}, loaded with {now}"
            wrong = [name for name, tensor in wanted.items() if not found[name].equal(tensor)]
            assert not wrong, f"{run}, loaded with {now}: {wrong}"
            target.step()
            assert any(name.endswith(".ema") for name in target.whole()) == bool(now)
