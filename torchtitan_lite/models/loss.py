"""The summed loss: the reference for the faster chunked losses.

The loss is a sum because ranks may have different numbers of targets; callers divide by the global number.

`train.z_loss` = z adds the gradient of z log(Z)^2 per target, where Z is the sum of exp(logits). It is not added to the
value, so that losses stay comparable.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.config.schema import Config

IGNORE = -100  # the target of a position without a loss


@dataclass(frozen=True)
class LossOptions:
    """The loss options of [train] and [speed]. The default is plain cross-entropy."""

    z_loss: float = 0.0
    router_aux_loss: float = 0.0
    router_z_loss: float = 0.0
    router_bias_rate: float = 0.0
    chunked: bool = False

    @classmethod
    def from_config(cls, config: Config) -> "LossOptions":
        c = config.train
        return cls(c.z_loss, c.router_aux_loss, c.router_z_loss, c.router_bias_rate, config.speed.chunked_loss)


def summed_cross_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Compute negative log-likelihoods in nats, in float32, of logits (B, T, V) and targets (B, T) or IGNORE.

    Returns:
        their sum, (), and each target's, (B T,), without gradients.
    """
    rows = logits.flatten(0, 1).float()
    losses = F.cross_entropy(rows, targets.flatten(), ignore_index=IGNORE, reduction="none")
    loss = losses.sum()
    if z_loss:
        more = z_loss * (rows.logsumexp(-1).square() * (targets.flatten() != IGNORE)).sum()
        loss = loss + (more - more.detach())
    return loss, losses.detach()


def plain_logits_to_gradient_(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float) -> Tensor:
    """Return each row's loss, (n,) float32. If `write`, overwrite logits (n, V) with their gradient."""
    log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
    losses = F.nll_loss(log_p, targets, ignore_index=ignore, reduction="none")
    if write:
        has_target = (targets != ignore)[:, None]
        p = log_p.exp_()
        if z_loss:
            p *= 1 + 2 * z_loss * logits.float().logsumexp(-1, keepdim=True)
        p.scatter_add_(1, torch.where(has_target, targets[:, None], 0), torch.full_like(p[:, :1], -1.0))
        logits.copy_(p.mul_(has_target))
    return losses


def of_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on a GPU, or a FakeTensor, which stands for one there."""
    return x.device.type != "cpu" or type(x) is not Tensor


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Convert a summed loss to bits per byte of text, which are comparable between tokenizers."""
    return nats / math.log(2) / n_bytes
