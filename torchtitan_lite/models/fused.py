"""RMSNorm and rotary positions with a backward of their own, for the CPU: in few passes over memory.

PyTorch computes both out of small operators, each of which reads and writes all activations, and keeps float32 copies
of them for backward. These compute in float32 too, in place where they can, and keep no more than their input.
(`compile.enabled` fuses the plain ones better than this.)
"""

from typing import Any

import torch
from torch import Tensor, nn


def use_fused(x: Tensor) -> bool:
    """Whether these functions are the faster ones."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _wide(x: Tensor) -> Tensor:
    """A copy to compute in."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm over the last dim (Zhang and Sennrich, 2019)."""

    fused = False  # set by parallelize.apply_fast_paths

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if self.fused and self.eps is not None and use_fused(x):
            return _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return super().forward(x)


class _RMSNorm(torch.autograd.Function):
    """x (..., D), weight (D,), eps -> (..., D) in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return wide.mul_(scale).mul_(weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        n = x.shape[-1]
        wide = weight.to(scale.dtype)
        grad, normed = _wide(grads[0]), _wide(x).mul_(scale)
        product = grad * normed
        d_weight = product.reshape(-1, n).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        along = torch.mv(product.reshape(-1, n), wide).view(scale.shape).div_(n)
        d_x = grad.mul_(wide).addcmul_(normed, along, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What llama.rotate computes. (B, T, H, E), and (T, E) or (B, T, E) float32 tables -> (B, T, H, E).

    The halves of the tables are equal, as rotary_tables makes them: backward is then the inverse rotation.
    """
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    wide = _wide(x)
    other = torch.cat((wide[..., half:], wide[..., :half]), -1)
    signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
    return wide.mul_(cos.unsqueeze(-2)).addcmul_(other, signed.unsqueeze(-2)).to(x.dtype)
