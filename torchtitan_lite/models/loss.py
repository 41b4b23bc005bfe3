"""The summed loss: the reference for the faster chunked losses.

The loss is a sum because ranks may have different numbers of targets; callers divide by the global number.

`train.z_loss` = z adds the gradient of z log(Z)^2 per target, where Z is the sum of exp(logits). It is not added to the
value, so that losses stay comparable.
"""

import math
from collections.abc import Callable
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


def summed_cross_entropy(
    logits: Tensor, targets: Tensor, z_loss: float = 0.0, token_losses: Tensor | None = None
) -> Tensor:
    """Return the summed negative log-likelihood in nats, () float32, of logits (B, T, V), targets (B, T) or IGNORE.

    Args:
        token_losses: filled with the loss of each target, (B T,) float32, without gradients.
    """
    rows = logits.flatten(0, 1).float()
    if token_losses is not None:
        token_losses.copy_(F.cross_entropy(rows.detach(), targets.flatten(), ignore_index=IGNORE, reduction="none"))
    loss = F.cross_entropy(rows, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    if not z_loss:
        return loss
    more = z_loss * (rows.logsumexp(-1).square() * (targets.flatten() != IGNORE)).sum()
    return loss + (more - more.detach())


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


def per_sequence_loss(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, targets: Tensor) -> Tensor:
    """Apply a summed loss to each sequence of x (B, T, ...) and targets (B, T). Returns (B,)."""
    return torch.stack([loss(x[i : i + 1], targets[i : i + 1]) for i in range(len(x))])


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Convert a summed loss to bits per byte of text, which are comparable between tokenizers."""
    return nats / math.log(2) / n_bytes
