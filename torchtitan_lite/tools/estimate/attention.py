"""Simulated attention on a GPU, in a process on the CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_attention: Any = functional.scaled_dot_product_attention


def efficient_attention(*args: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Attention as on a GPU, where a bias with a gradient has a fused kernel too. The CPU would store all scores."""
    if attn_mask is None or not attn_mask.requires_grad:
        return _attention(*args, attn_mask=attn_mask, **kwargs)
    found = _attention(*args, attn_mask=attn_mask.detach(), **kwargs)
    return _GradientOfBias.apply(found, attn_mask)  # type: ignore[no-untyped-call]


class _GradientOfBias(torch.autograd.Function):
    """The memory of the gradient that the kernel writes: of the size of all scores."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, bias: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = bias.shape, bias.dtype
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_empty(ctx.shape, dtype=ctx.dtype)
