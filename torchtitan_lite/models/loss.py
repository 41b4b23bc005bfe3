"""The summed loss: the specification, which the faster chunked losses have to compute too.

The loss is a sum because ranks may hold different numbers of targets; callers divide by the global number.

With `train.z_loss` = z, gradients are those of the loss plus z log(Z)^2 per target, where Z is the sum of exp(logits).
The value stays without it, so that losses remain comparable.
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
    """What [train] and [speed] say about a model's losses. By default there is nothing but the cross-entropy."""

    z_loss: float = 0.0
    router_aux_loss: float = 0.0
    router_z_loss: float = 0.0
    router_bias_rate: float = 0.0
    chunked: bool = False

    @classmethod
    def of(cls, config: Config) -> "LossOptions":
        c = config.train
        return cls(c.z_loss, c.router_aux_loss, c.router_z_loss, c.router_bias_rate, config.speed.chunked_loss)


def summed_cross_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """The summed negative log-likelihood in nats, () float32, of logits (B, T, V) and targets (B, T) or IGNORE."""
    rows = logits.flatten(0, 1).float()
    loss = F.cross_entropy(rows, targets.flatten(), ignore_index=IGNORE, reduction="sum")
    if not z_loss:
        return loss
    more = z_loss * (rows.logsumexp(-1).square() * (targets.flatten() != IGNORE)).sum()
    return loss + (more - more.detach())


def of_each(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sequence, (B,), where `loss` sums over all sequences of x (B, T, ...) and targets (B, T)."""
    return torch.stack([loss(x[i : i + 1], targets[i : i + 1]) for i in range(len(x))])


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """A summed loss per byte of text, which unlike a loss per token is comparable between tokenizers."""
    return nats / math.log(2) / n_bytes
