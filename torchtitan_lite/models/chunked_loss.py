"""The output matrix and the loss, in chunks of tokens: only one chunk's logits exist at a time.

Forward computes the gradients too, without a factor that only backward knows: the gradient of a summed cross-entropy
with respect to the logits is softmax - onehot. So each chunk's logits are freed in forward.

On a GPU all three matmuls need aligned rows. A vocabulary such as 50,257 is padded to a multiple of 64, with zero rows
in a copy of the weight, and logits of -inf, whose gradient is 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.models.loss import IGNORE

LOGITS_BYTES = 1 << 30  # per chunk; smaller chunks save memory, but each costs a pass over the weight's gradient


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, token_losses: Tensor | None = None
) -> Tensor:
    """Compute summed_cross_entropy(x @ weight.T, targets, z_loss), a chunk of tokens at a time.

    Logits are rounded to the dtype of `x`. Softmax, loss and the accumulated weight gradient are float32.

    Args:
        x: (B, T, D), any float dtype.
        weight: (V, D), of the same dtype.
        targets: (B, T) int64, or IGNORE.
        token_losses: filled with the loss of each target, (B T,) float32, without gradients.
    """
    wants_dx = torch.is_grad_enabled() and x.requires_grad
    wants_dw = torch.is_grad_enabled() and weight.requires_grad
    return _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, 1), weight, targets.flatten(), wants_dx, wants_dw, z_loss, token_losses
    )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """x (N, D), weight (V, D), targets (N,), flags for the gradients to compute, z_loss, token_losses -> ()."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        wants_dx: bool,
        wants_dw: bool,
        z_loss: float,
        token_losses: Tensor | None,
    ) -> Tensor:
        from torchtitan_lite.models import loss_operators

        vocab_size, wants = len(weight), wants_dx or wants_dw
        padding = loss_operators.padding(x, vocab_size)
        if padding and wants:  # in evaluation, the copy would cost more than it saves
            weight = F.pad(weight, (0, 0, 0, padding))
        chunk = chunk_size(len(x), vocab_size + padding, x.element_size())
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        dx = torch.empty_like(x) if wants_dx else None
        dw = torch.empty(weight.shape, dtype=torch.float32, device=x.device) if wants_dw else None
        buffer = x.new_empty(min(chunk, len(x)), vocab_size + padding)
        for start in range(0, len(x), chunk):
            part = x[start : start + chunk]
            logits = buffer[: len(part)]
            torch.mm(part, weight.T, out=logits[:, : len(weight)])
            if padding:
                logits[:, vocab_size:].fill_(-torch.inf)
            losses = loss_operators.logits_to_gradient_(logits, targets[start : start + chunk], IGNORE, wants, z_loss)
            loss += losses.sum()
            if token_losses is not None:
                token_losses[start : start + chunk] = losses
            if dx is not None:
                torch.mm(logits, weight, out=dx[start : start + chunk])
            if dw is not None:
                loss_operators.add_matmul_(dw, logits.T, part, first=start == 0)
        if dw is not None:
            dw = dw[:vocab_size] if len(x) else dw[:vocab_size].zero_()
        ctx.save_for_backward(dx, dw)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        if dx is not None:
            dx = (dx * grads[0]).to(dx.dtype)
        if dw is not None:  # scale and cast in one pass
            dw = torch.mul(dw, grads[0], out=torch.empty(dw.shape, dtype=ctx.dtype, device=dw.device))
        return dx, dw, *(None,) * 5


def chunk_size(n: int, vocab_size: int, itemsize: int) -> int:
    """Return the tokens per chunk: equal chunks of at most LOGITS_BYTES, in multiples of 128 (or all)."""
    most = max(LOGITS_BYTES // (vocab_size * itemsize) // 128 * 128, 128)
    even = -(-n // max(-(-n // most), 1))
    return max(min(-(-even // 128) * 128, most), 1)
