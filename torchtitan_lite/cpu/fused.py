"""RMSNorm and rotary positions with their own backward and few passes over memory.

PyTorch's small operators each read and write all activations, and keep float32 copies for backward. These versions also
compute in float32, but mostly in place, and keep only their input.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.models import llama


def fuse_norms(model: nn.Module) -> None:
    """Replace every nn.RMSNorm by a fused one, in place."""
    for module in model.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = RMSNorm


def fuse_rotations(model: nn.Module) -> None:
    """Replace llama's `rotate` in every module that uses it."""
    for module in model.modules():
        if getattr(module, "rotate", None) is llama.rotate:
            module.rotate = rotate  # type: ignore[assignment]


def _use_fused(x: Tensor) -> bool:
    """Return whether these functions are faster than PyTorch's. (torch.compile fuses the plain ones better.)"""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _wide(x: Tensor) -> Tensor:
    """Cast to float32, unless x is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Return x * scale, in float32 or wider."""
    wide = _wide(x)
    return torch.mul(wide, scale, out=None if wide is x else wide)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm over the last dim (Zhang and Sennrich, 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if self.eps is not None and self.weight is not None and _use_fused(x):
            return _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return super().forward(x)


class _RMSNorm(torch.autograd.Function):
    """x (..., D), weight (D,), eps -> (..., D) in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(_wide(x), dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return _scaled(x, scale).mul_(weight.to(scale.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        n = x.shape[-1]
        wide = weight.to(scale.dtype)
        grad, normed = _wide(grads[0]), _scaled(x, scale)
        product = grad * normed
        d_weight = product.reshape(-1, n).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        along = torch.mv(product.reshape(-1, n), wide).view(scale.shape).div_(n)
        d_x = torch.mul(grad, wide, out=product).addcmul_(normed, along, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute llama.rotate, fused: (B, T, H, E), and (T, E) or (B, T, E) float32 tables -> (B, T, H, E).

    Backward is the inverse rotation, so both halves of a table must be equal, as in rotary_tables.
    """
    if not _use_fused(x):
        return llama.rotate(x, cos, sin)
    return _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = x.shape[-1] // 2
    wide, sin = _wide(x), sin.unsqueeze(-2)
    out = wide * cos.unsqueeze(-2)
    out[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-direction)
    out[..., half:].addcmul_(wide[..., :half], sin[..., half:], value=direction)
    return out.to(x.dtype)
