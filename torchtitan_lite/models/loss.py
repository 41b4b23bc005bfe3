"""The summed loss, and the output matrix that computes it in chunks of tokens.

The loss is a sum because ranks may hold different numbers of targets; callers divide by the global number.

With `train.z_loss` = z, gradients are those of the loss plus z log(Z)^2 per target, where Z is the sum of exp(logits).
The value stays without it, so that losses remain comparable.

Only one chunk's logits exist at a time. The gradient of a summed cross-entropy with respect to the logits is
softmax - onehot, up to a factor that backward provides. So forward also computes the gradients of its inputs and frees
each chunk's logits: memory does not grow with tokens times vocabulary, and a chunk stays in the cache.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100  # the target of a position without a loss


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


# Tokens in a chunk; twice as many in float32, whose softmax overwrites the logits. More are faster, but take memory.
CHUNK = {"cpu": 256, "cuda": 4096}
KERNEL_ON = {"cuda"}  # devices with a kernel for a chunk's loss and gradient, and chunks of its own size: fused_loss.py


class Head(nn.Linear):
    """The output matrix. Given targets, it returns the loss: FSDP gathers the matrix only during this forward."""

    chunked = False  # set by parallelize.apply_fast_paths
    z_loss = 0.0  # set by train.sharded_model
    widened, linear = False, staticmethod(F.linear)  # set by widened.widen

    def forward(self, x: Tensor, targets: Tensor | None = None, *, per_sequence: bool = False) -> Tensor:
        """(B, T, D) -> (B, T, V) logits; with targets, (B, T) int64, the loss, () float32, or (B,) per sequence."""
        if targets is None:
            return self.linear(x, self.weight)
        return of_each(self._loss, x, targets) if per_sequence else self._loss(x, targets)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            # chunked gradients are rounded before the loss is scaled, and small ones would become zero
            return summed_cross_entropy(self.linear(x, self.weight), targets, self.z_loss)
        return chunked_cross_entropy(x, self.weight, targets, self.z_loss, widened=self.widened)


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, *, widened: bool = False
) -> Tensor:
    """summed_cross_entropy(x @ weight.T, targets, z_loss), a chunk of tokens at a time.

    Logits are rounded to the dtype of `x`. Softmax, loss and the sum of the weight's gradient are float32.

    Args:
        x: (B, T, D), any float dtype.
        weight: (V, D), of the same dtype.
        targets: (B, T) int64, or IGNORE.
        widened: compute the products in float32.
    """
    learns = torch.is_grad_enabled()
    wanted = learns and x.requires_grad, learns and weight.requires_grad
    if x.device.type in KERNEL_ON:
        from torchtitan_lite.models import fused_loss

        if fused_loss.is_usable(x, len(weight)):
            return fused_loss.fused_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), IGNORE, *wanted, z_loss)
    return _ChunkedCrossEntropy.apply(x.flatten(0, 1), weight, targets.flatten(), *wanted, widened, z_loss)  # type: ignore[no-untyped-call]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """x (N, D), weight (V, D), targets (N,), whether dx and dw are wanted, `widened`, `z_loss` -> ()."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, wants_dx: bool, wants_dw: bool, widened: bool, z: float
    ) -> Tensor:
        chunk = CHUNK.get(x.device.type, max(CHUNK.values())) * (2 if x.dtype == torch.float32 else 1)
        dx = torch.empty_like(x) if wants_dx else None
        dw = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants_dw else None
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        matrix = weight.float() if widened else weight
        for start in range(0, len(x), chunk):
            part = x[start : start + chunk].to(matrix.dtype)
            losses, d_logits = _softmax_minus_onehot((part @ matrix.T).to(x.dtype), targets[start : start + chunk], z)
            loss += losses.sum()
            d_logits = d_logits.to(matrix.dtype)
            if dx is not None:
                dx[start : start + chunk] = d_logits @ matrix
            if dw is not None:
                _add_product(dw, d_logits.T, part)
        ctx.save_for_backward(dx, dw)
        ctx.dtype = weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        factor = grads[0]
        return (
            None if dx is None else (dx * factor).to(dx.dtype),
            None if dw is None else _scaled(dw, factor, ctx.dtype),
            *(None,) * 5,
        )


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one @ other, (V, D); across dtypes in groups of rows: PyTorch would first copy the whole product."""
    if total.dtype == one.dtype:
        total.addmm_(one, other)
        return
    for rows, more in zip(total.split(_rows(total)), (one @ other).split(_rows(total)), strict=True):
        rows += more


def _scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """total * factor in another dtype, without an intermediate copy of the product."""
    out = torch.empty(total.shape, dtype=dtype, device=total.device)
    for rows, to in zip(total.split(_rows(total)), out.split(_rows(total)), strict=True):
        to.copy_(rows * factor)
    return out


def _rows(total: Tensor) -> int:
    """Rows that fit into a core's cache; on a GPU, all."""
    return len(total) if total.is_cuda else 1024


def _softmax_minus_onehot(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """The loss of each token, (n,) float32, and the gradient of their sum, (n, V), in place of float32 logits."""
    counts = (targets != IGNORE)[:, None]
    index = torch.where(counts, targets[:, None], 0)
    largest, own = logits.amax(-1, keepdim=True).float(), logits.gather(1, index).float()
    # five passes: torch.softmax alone takes as long as these without AVX512, and does not return the sum
    p = torch.sub(logits, largest, out=logits if logits.dtype == torch.float32 else None).exp_()
    total = p.sum(-1, keepdim=True)
    normaliser = largest + total.log()
    losses = torch.where(counts, normaliser - own, 0.0)
    p *= counts * (1 + 2 * z_loss * normaliser) / total if z_loss else counts / total
    p.scatter_add_(1, index, -counts.float())
    return losses[:, 0], p.to(logits.dtype)
