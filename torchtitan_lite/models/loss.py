"""The summed loss, and the output matrix that computes it in chunks of tokens.

The loss is a sum because ranks may hold different numbers of targets; callers divide by the global number.

With `train.z_loss` = z, gradients are those of the loss plus z log(Z)^2 per target, where Z is the sum of exp(logits).
The value stays without it, so that losses remain comparable.

Only one chunk's logits exist at a time. The gradient of a summed cross-entropy with respect to the logits is
softmax - onehot, up to a factor that backward provides. So forward also computes the gradients of its inputs and frees
each chunk's logits: memory does not grow with tokens times vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.models import loss_operators

IGNORE = -100  # the target of a position without a loss
LOGITS_BYTES = 1 << 30  # of a chunk's logits. They bound memory; each chunk costs a pass over the weight's gradient


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


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """summed_cross_entropy(x @ weight.T, targets, z_loss), a chunk of tokens at a time.

    Logits are rounded to the dtype of `x`. Softmax, loss and the sum of the weight's gradient are float32.

    Args:
        x: (B, T, D), any float dtype.
        weight: (V, D), of the same dtype.
        targets: (B, T) int64, or IGNORE.
    """
    wants_dx = torch.is_grad_enabled() and x.requires_grad
    wants_dw = torch.is_grad_enabled() and weight.requires_grad
    rows, goals = x.flatten(0, 1), targets.flatten()
    return _ChunkedCrossEntropy.apply(rows, weight, goals, wants_dx, wants_dw, z_loss)  # type: ignore[no-untyped-call]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """x (N, D), weight (V, D), targets (N,), whether their gradients are wanted, and z_loss -> ()."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, wants_dx: bool, wants_dw: bool, z_loss: float
    ) -> Tensor:
        chunk = chunk_size(len(x), len(weight), x.element_size())
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        dx = torch.empty_like(x) if wants_dx else None
        dw = torch.empty(weight.shape, dtype=torch.float32, device=x.device) if wants_dw else None
        buffer = x.new_empty(min(chunk, len(x)), len(weight))
        for start in range(0, len(x), chunk):
            part, goals = x[start : start + chunk], targets[start : start + chunk]
            logits = torch.mm(part, weight.T, out=buffer[: len(part)])
            loss += loss_operators.logits_to_gradient_(logits, goals, IGNORE, wants_dx or wants_dw, z_loss).sum()
            if dx is not None:
                torch.mm(logits, weight, out=dx[start : start + chunk])
            if dw is not None:
                loss_operators.add_product(dw, logits.T, part, first=start == 0)
        ctx.save_for_backward(dx, dw.zero_() if dw is not None and not len(x) else dw)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        if dx is not None:
            dx = (dx * grads[0]).to(dx.dtype)
        if dw is not None:  # in one pass, without a float32 product
            dw = torch.mul(dw, grads[0], out=torch.empty(dw.shape, dtype=ctx.dtype, device=dw.device))
        return dx, dw, *(None,) * 4


def chunk_size(n: int, vocab_size: int, itemsize: int) -> int:
    """Tokens per chunk: equal chunks of at most LOGITS_BYTES, in multiples of 128 (or all)."""
    most = max(LOGITS_BYTES // (vocab_size * itemsize) // 128 * 128, 128)
    even = -(-n // max(-(-n // most), 1))
    return max(min(-(-even // 128) * 128, most), 1)


class Head(nn.Linear):
    """The output matrix. Given targets, it returns the loss: FSDP gathers the matrix only during this forward."""

    chunked = False  # speed.chunked_loss
    z_loss = 0.0  # train.z_loss
    linear, cross_entropy = staticmethod(F.linear), staticmethod(chunked_cross_entropy)  # cpu/ replaces them

    def forward(self, x: Tensor, targets: Tensor | None = None, *, per_sequence: bool = False) -> Tensor:
        """(B, T, D) -> (B, T, V) logits; with targets, (B, T) int64, the loss, () float32, or (B,) per sequence."""
        if targets is None:
            return self.linear(x, self.weight)
        return of_each(self._loss, x, targets) if per_sequence else self._loss(x, targets)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            # chunked gradients are rounded before the loss is scaled, and small ones would become zero
            return summed_cross_entropy(self.linear(x, self.weight), targets, self.z_loss)
        return self.cross_entropy(x, self.weight, targets, self.z_loss)
