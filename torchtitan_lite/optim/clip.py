"""The norm of the gradients, and clipping by it."""

import math

import torch
from torch import Tensor, nn

from torchtitan_lite.distributed.sharding import copies_of, local_rows
from torchtitan_lite.optim.grad_scaler import GradScaler


@torch.no_grad()
def squared_norm(model: nn.Module) -> Tensor:
    """This rank's part of the gradients' squared norm, () float64: the sum over all ranks is the square."""
    norm = torch.nn.utils.get_total_norm([local_rows(p.grad)[0] for p in model.parameters() if p.grad is not None])
    return norm.double().square() / copies_of(next(model.parameters()))


@torch.no_grad()
def clip_gradients(optimizer: torch.optim.Optimizer, norm: Tensor, max_norm: float, scaler: GradScaler) -> None:
    """Remove the loss scale, and scale the gradients down to a global norm of at most max_norm.

    A fused optimizer divides by its `grad_scale` while it reads the gradients, which saves a pass over them.

    Args:
        norm: the unscaled global norm, () float32.
    """
    if max_norm == math.inf and not scaler.enabled:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in torch.nn.utils.clip_grad_norm_
    factor = scaler.unscaled(factor).to(parameters[0].device)  # the host's with cpu_offload
    if optimizer.defaults.get("fused"):
        optimizer.grad_scale = 1 / factor  # type: ignore[attr-defined]
    else:
        torch._foreach_mul_([local_rows(p.grad)[0] for p in parameters if p.grad is not None], factor)
