"""Initial parameters that do not depend on the sharding, and a check that every element was written.

Each element is a function of the seed, the parameter's name and its index (normal_values.py): the same bits on any mesh
or device. (Draws from a random stream would depend on the world size.) Each rank computes only its own rows.
"""

import functools
import math

import torch
from torch import Tensor, nn

from torchtitan_lite.distributed.normal_values import normal_
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.models import Transformer


def materialize(model: Transformer, device: torch.device, seed: int, *, offload: bool = False) -> None:
    """Allocate and initialise a sharded model that is on the meta device, and check the result.

    Args:
        offload: keep the parameters on the host; only the buffers go to the device.

    Raises:
        RuntimeError: see `require_initialised`.
    """
    model.to_empty(device="cpu" if offload else device)
    if offload:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))
    model.tie_weights()  # to_empty unties: it allocates a tensor for each name
    for _, tensor in _tensors(model):  # NaN or the smallest integer marks unwritten elements
        tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
    model.reset_parameters(functools.partial(normal_, seed))
    require_initialised(model)


@torch.no_grad()
def require_initialised(model: nn.Module) -> None:
    """Check every parameter and buffer of this rank.

    Raises:
        RuntimeError: names each tensor that is unwritten, not finite, or a constant matrix.
    """
    problems = []
    for name, tensor in _tensors(model):
        floats = tensor.is_floating_point()
        if not (tensor.isfinite() if floats else tensor > torch.iinfo(tensor.dtype).min).all():
            problems.append(f"{name} has values that are not finite: it was not fully initialised")
        elif tensor.ndim > 1 and tensor.numel() > 1 and (tensor == tensor.flatten()[0]).all():
            problems.append(f"{name} is constant")
    if problems:
        raise RuntimeError("the model is not initialised: " + "; ".join(problems))


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the name and this rank's rows of each parameter and buffer."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, own_part(t)[0].detach()) for name, t in named]
