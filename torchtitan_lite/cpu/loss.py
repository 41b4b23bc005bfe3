"""The chunked loss for the CPU: mostly in place, in chunks and groups of rows that fit into the cache."""

import functools

import torch
from torch import Tensor

from torchtitan_lite.models import chunked_loss as plain
from torchtitan_lite.models.chunked_loss import ROWS
from torchtitan_lite.models.loss import IGNORE

CHUNK = 256  # tokens per chunk; doubled in float32, where softmax overwrites the logits


def chunked_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, z_loss: float = 0.0, *, matmul_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Compute models.chunked_loss.chunked_cross_entropy, with matmuls in `matmul_dtype` if given."""
    if x.device.type != "cpu":
        return plain.chunked_cross_entropy(x, weight, targets, z_loss)
    compute = functools.partial(_in_chunks, targets.flatten(), z_loss, matmul_dtype or weight.dtype)
    return plain.with_gradients(compute, x, weight)


def _in_chunks(
    targets: Tensor,
    z_loss: float,
    matmul_dtype: torch.dtype,
    x: Tensor,
    weight: Tensor,
    wants_dx: bool,
    wants_dw: bool,
) -> plain.Found:
    chunk = CHUNK * (2 if x.dtype == torch.float32 else 1)
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if wants_dx else None
    dw = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wants_dw else None
    matrix = weight.to(matmul_dtype)
    for start in range(0, len(x), chunk):
        these = slice(start, start + chunk)
        part = x[these].to(matmul_dtype)
        logits = (part @ matrix.T).to(x.dtype)
        losses[these], d_logits = _softmax_minus_onehot(logits, targets[these], z_loss)
        d_logits = d_logits.to(matmul_dtype)
        if dx is not None:
            dx[these] = d_logits @ matrix
        if dw is not None:
            _add_matmul_(dw, d_logits.T, part)
    return losses, dx, dw


def _add_matmul_(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add one @ other, (V, D), to `total`. If dtypes differ, add groups of rows, so the whole result is never cast."""
    if total.dtype == one.dtype:
        total.addmm_(one, other)
        return
    for rows, more in zip(total.split(ROWS), (one @ other).split(ROWS), strict=True):
        rows += more


def _softmax_minus_onehot(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return each token's loss, (n,) float32, and the gradient of their sum, (n, V), in place for float32 logits."""
    has_target = (targets != IGNORE)[:, None]
    index = torch.where(has_target, targets[:, None], 0)
    largest, own = logits.amax(-1, keepdim=True).float(), logits.gather(1, index).float()
    # five passes: without AVX512, torch.softmax alone takes as long, and it does not return the sum
    p = torch.sub(logits, largest, out=logits if logits.dtype == torch.float32 else None).exp_()
    total = p.sum(-1, keepdim=True)
    normaliser = largest + total.log()
    losses = torch.where(has_target, normaliser - own, 0.0)
    p *= has_target * (1 + 2 * z_loss * normaliser) / total if z_loss else has_target / total
    p.scatter_add_(1, index, -has_target.float())
    return losses[:, 0], p.to(logits.dtype)
