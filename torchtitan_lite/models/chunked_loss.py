"""The output matrix and the loss, in chunks of tokens: only one chunk's logits exist at a time.

Forward computes the gradients too, without a factor that only backward knows: the gradient of a summed cross-entropy
with respect to the logits is softmax - onehot. So each chunk's logits are freed in forward.

On a GPU all three matmuls need aligned rows. A vocabulary such as 50,257 is padded to a multiple of 64, with zero rows
in a copy of the weight, and logits of -inf, whose gradient is 0.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.models.loss import IGNORE, of_gpu

LOGITS_BYTES = 1 << 30  # per chunk; smaller chunks save memory, but each costs a pass over the weight's gradient
ROWS = 1024  # rows of the weight's gradient that fit into a CPU core's cache

# losses (N,) float32, and the gradients of their sum, if wanted: of x, in its dtype, and of the weight, in float32
Found = tuple[Tensor, Tensor | None, Tensor | None]
Compute = Callable[[Tensor, Tensor, bool, bool], Found]  # of x (N, D), weight (V, D), and the gradients to compute


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Compute summed_cross_entropy(x @ weight.T, targets, z_loss), a chunk of tokens at a time.

    Logits are rounded to the dtype of `x`. Softmax, loss and the accumulated weight gradient are float32.

    Args:
        x: (B, T, D), any float dtype.
        weight: (V, D), of the same dtype.
        targets: (B, T) int64, or IGNORE.
    """
    return with_gradients(functools.partial(_in_chunks, targets.flatten(), z_loss), x, weight)


def with_gradients(compute: Compute, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return what summed_cross_entropy returns, by a function that computes losses and gradients together."""
    wants = [torch.is_grad_enabled() and t.requires_grad for t in (x, weight)]
    return _WithGradients.apply(x.flatten(0, 1), weight, compute, *wants)  # type: ignore[no-untyped-call]


class _WithGradients(torch.autograd.Function):
    """Multiplies the gradients by the factor that backward knows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, compute: Compute, wants_dx: bool, wants_dw: bool
    ) -> tuple[Tensor, Tensor]:
        losses, dx, dw = compute(x, weight, wants_dx, wants_dw)
        ctx.save_for_backward(dx, dw)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        ctx.set_materialize_grads(False)  # zeros for `losses` would be a kernel
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, factor: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        if dx is not None:
            dx = (dx * factor).to(dx.dtype)
        if dw is not None:
            dw = _scaled(dw, factor, ctx.dtype)
        return dx, dw, None, None, None


def _scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return total * factor in `dtype`, without an intermediate copy in total's dtype."""
    out = torch.empty(total.shape, dtype=dtype, device=total.device)
    n = len(total) if of_gpu(total) else ROWS  # a CPU casts in a pass of its own
    for rows, to in zip(total.split(n), out.split(n), strict=True):
        torch.mul(rows, factor, out=to)
    return out


def _in_chunks(targets: Tensor, z_loss: float, x: Tensor, weight: Tensor, wants_dx: bool, wants_dw: bool) -> Found:
    from torchtitan_lite.models import loss_operators

    vocab_size, wants = len(weight), wants_dx or wants_dw
    padding = loss_operators.padding(x, vocab_size)
    if padding and wants:  # in evaluation, the copy would cost more than it saves
        weight = F.pad(weight, (0, 0, 0, padding))
    chunk = chunk_size(len(x), vocab_size + padding, x.element_size())
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if wants_dx else None
    dw = torch.empty(weight.shape, dtype=torch.float32, device=x.device) if wants_dw else None
    buffer = x.new_empty(min(chunk, len(x)), vocab_size + padding)
    for start in range(0, len(x), chunk):
        these = slice(start, start + chunk)
        part = x[these]
        logits = buffer[: len(part)]
        torch.mm(part, weight.T, out=logits[:, : len(weight)])
        if padding:
            logits[:, vocab_size:].fill_(-torch.inf)
        losses[these] = loss_operators.logits_to_gradient_(logits, targets[these], IGNORE, wants, z_loss)
        if dx is not None:
            torch.mm(logits, weight, out=dx[these])
        if dw is not None:
            loss_operators.add_matmul_(dw, logits.T, part, first=start == 0)
    if dw is not None:
        dw = dw[:vocab_size] if len(x) else dw[:vocab_size].zero_()
    return losses, dx, dw


def chunk_size(n: int, vocab_size: int, itemsize: int) -> int:
    """Return the tokens per chunk: equal chunks of at most LOGITS_BYTES, in multiples of 128 (or all)."""
    most = max(LOGITS_BYTES // (vocab_size * itemsize) // 128 * 128, 128)
    even = -(-n // max(-(-n // most), 1))
    return max(min(-(-even // 128) * 128, most), 1)
