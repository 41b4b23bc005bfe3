"""Computes bfloat16 and float16 matmuls in float32, on CPUs without 16-bit matmul instructions.

Such a CPU multiplies 16-bit matrices 20 to 40 times slower than float32 ones (docs/lab). A matmul's inputs are 16-bit
numbers, and its sums are float32 anyway. So computing in float32 and rounding the result once differs from native
16-bit instructions only in the order of the sums.
"""

import functools
import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.cpu import loss
from torchtitan_lite.distributed.exchange import on_rank0
from torchtitan_lite.models import Transformer


def slow_dtypes() -> list[str]:
    """Return the 16-bit dtypes for which this CPU has no matmul instructions.

    Reads CPU flags, because timings could decide differently between ranks and resumes.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    mkldnn = torch.ops.mkldnn  # respects ONEDNN_MAX_CPU_ISA, but counts emulated bfloat16 as supported
    bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    fast = {
        "bfloat16": bfloat16 and mkldnn._is_mkldnn_bf16_supported(),
        "float16": mkldnn._is_mkldnn_fp16_supported(),
    }
    return [dtype for dtype, supported in fast.items() if not supported]


@functools.cache
def slow_on_rank0() -> list[str]:
    """Return rank 0's `slow_dtypes`, which decide for all ranks. The first call is a collective."""
    return on_rank0(slow_dtypes)


def use_float32_matmuls(model: Transformer) -> None:
    """Use float32 matmuls in nn.Linear, experts, attention and the output matrix.

    Attention keeps its current implementation, on float32 copies of its inputs.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
        for name in ("attend", "multiply"):  # of attention, and of experts
            if hasattr(module, name):
                setattr(module, name, functools.partial(in_float32, getattr(module, name)))
    model.output.linear = linear  # type: ignore[assignment]  # F.linear's first argument has a different name
    model.output.cross_entropy = functools.partial(loss.chunked_cross_entropy, matmul_dtype=torch.float32)


def in_float32(function: Callable[..., Tensor], x: Tensor, *others: Tensor | None, **options: Any) -> Tensor:
    """Call a function of matmuls with float32 copies of its matrices, and round the result to the dtype of x."""
    wide = (t.float() if t is not None and t.is_floating_point() else t for t in others)
    return function(x.float(), *wide, **options).to(x.dtype)


class Linear(nn.Linear):
    """nn.Linear with 16-bit matmuls computed in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., N), in x's dtype."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear in float32, and round the result to the dtype of x."""
    return in_float32(F.linear, x, weight, bias)
