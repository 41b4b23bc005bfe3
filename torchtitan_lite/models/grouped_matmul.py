"""The grouped matmul of experts, each group of tokens with its own matrix, as one operator.

FakeTensors and compiled blocks see the operator too. On a GPU in bfloat16 it calls `torch.nn.functional.grouped_mm`,
and the host does not wait for the loads. Otherwise it loops over matmuls, in any dtype and shape. The loop reads the
loads on the host, which on a CPU costs nothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNED = 16  # bytes; `torch.nn.functional.grouped_mm` needs row strides that are multiples of this


def loop_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix.

    Args:
        x: (N, I), the rows of group 0 first.
        weight: (G, O, I).
        ends: (G,) int32, the end row of each group (exclusive); the last is N.

    Returns:
        (N, O)
    """
    out = x.new_empty(len(x), weight.shape[1])
    for g, (start, end) in enumerate(_bounds(ends)):
        torch.mm(x[start:end], weight[g].T, out=out[start:end])
    return out


def loop_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Compute the gradient of `weight`, (G, O, I), from the result's, (N, O). A group without rows gets 0."""
    out = x.new_empty(len(ends), grad.shape[1], x.shape[1])
    for g, (start, end) in enumerate(_bounds(ends)):
        torch.mm(grad[start:end].T, x[start:end], out=out[g])
    return out


def _bounds(ends: Tensor) -> list[tuple[int, int]]:
    after = ends.tolist()
    return list(zip([0, *after], after, strict=False))


_NAME = "torchtitan_lite::grouped_"
grouped_matmul = torch.library.custom_op(f"{_NAME}matmul", loop_matmul, mutates_args=(), device_types="cpu")
grouped_gradient = torch.library.custom_op(f"{_NAME}gradient", loop_gradient, mutates_args=(), device_types="cpu")


@grouped_matmul.register_kernel("cuda")
def _matmul_on_cuda(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if _grouped_mm_takes(x, weight):
        return F.grouped_mm(x, weight.mT, offs=ends)
    return loop_matmul(x, weight, ends)


@grouped_gradient.register_kernel("cuda")
def _gradient_on_cuda(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if not _grouped_mm_takes(grad, x):
        return loop_gradient(grad, x, ends)
    out = F.grouped_mm(grad.T, x, offs=ends)
    empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
    return out.masked_fill_(empty[:, None, None], 0)  # a B200 leaves garbage in empty groups (pytorch #172439)


def _grouped_mm_takes(*factors: Tensor) -> bool:
    aligned = all(stride * 2 % _ALIGNED == 0 for t in factors for stride in t.stride() if stride != 1)
    return aligned and all(t.dtype == torch.bfloat16 for t in factors)


@grouped_matmul.register_fake
def _fake_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@grouped_gradient.register_fake
def _fake_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), grad.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    return (
        grouped_matmul(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None,
        grouped_gradient(grad, x, ends) if ctx.needs_input_grad[1] else None,
        None,
    )


grouped_matmul.register_autograd(_backward, setup_context=_keep)
