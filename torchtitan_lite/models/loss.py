"""The loss, as a sum: whoever needs a mean divides by the number of valid tokens of all ranks and micro-batches.

A mean per rank, averaged over the ranks, is another number as soon as the ranks hold different counts of targets.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # the target of a position that counts for nothing


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The summed negative log-likelihood, in nats and float32.

    Args:
        logits: (B, T, V), any float dtype.
        targets: (B, T) int64, IGNORE where there is nothing to learn.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def of_each(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sequence, (B,), where `loss` sums over all sequences of x (B, T, ...) and targets (B, T)."""
    return torch.stack([loss(x[i : i + 1], targets[i : i + 1]) for i in range(len(x))])


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """A summed loss per byte of the text it predicts: comparable between tokenizers, which a loss per token is not."""
    return nats / math.log(2) / n_bytes
