"""bfloat16 and float16 on CPUs without instructions for them: products in float32.

Such a CPU multiplies 16-bit matrices 20 to 40 times slower than float32 ones (docs/lab). The inputs of a product
are 16-bit numbers, and its sums are float32 anyway: computing it in float32 and rounding the result once differs from
the CPU's instructions only in the order of a sum.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = torch.bfloat16, torch.float16


def widen(model: nn.Module) -> None:
    """Compute the products of every plain nn.Linear in float32; attention and the loss have a flag for it."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
        elif hasattr(module, "widened"):  # attention, and the output matrix
            flagged: Any = module
            flagged.widened = True
            if isinstance(module, nn.Linear):
                flagged.linear = linear


class Linear(nn.Linear):
    """nn.Linear whose 16-bit products are computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., N), in the dtype of x."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; with 16-bit inputs computed in float32, and rounded to their dtype."""
    if x.dtype not in DTYPES or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """x (..., D), weight (N, D), bias (N,) or None -> (..., N). Keeps its 16-bit inputs, not float32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        grad = grads[0].float()
        rows, inputs = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (grad, x.float()))
        return (
            (grad @ weight.float()).to(x.dtype) if wanted[0] else None,
            (rows.T @ inputs).to(weight.dtype) if wanted[1] else None,
            rows.sum(0).to(weight.dtype) if wanted[2] else None,
        )
