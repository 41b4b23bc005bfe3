"""The Triton kernel of the loss. Imported only on a GPU; tests run it on a stand-in for Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 32768  # columns that one row's threads process at once


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    n_columns,
    row_stride,
    z_loss,
    IGNORE: tl.constexpr,  # noqa: N803  # Triton's convention for constants
    WRITE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)  # a chunk may have more than 2^31 logits
    logits += row * row_stride
    target = tl.load(targets + row)
    if target == IGNORE:
        tl.store(losses + row, 0.0)
        if WRITE:
            for start in range(0, n_columns, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                tl.store(logits + columns, 0.0, mask=columns < n_columns)
        return
    at_target = tl.load(logits + target, mask=target < n_columns, other=float("nan")).to(tl.float32)
    # first pass: the largest logit so far, and the sum of exp(logit - largest)
    largest = -3.0e38
    total = 0.0
    for start in range(0, n_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < n_columns, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    normaliser = largest + tl.log(total)
    tl.store(losses + row, normaliser - at_target)
    if WRITE:
        more = 1.0 + 2.0 * z_loss * normaliser  # d(loss)/d(log(Z))
        # second pass, in place: the row is still in the L2 cache
        for start in range(0, n_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(logits + columns, mask=columns < n_columns, other=-float("inf")).to(tl.float32)
            gradient = tl.exp(x - normaliser) * more - tl.where(columns == target, 1.0, 0.0)
            tl.store(logits + columns, gradient, mask=columns < n_columns)


def launch(logits: Tensor, targets: Tensor, ignore: int, write: bool, z_loss: float) -> Tensor:
    """Return each row's loss, (n,) float32. If `write`, overwrite logits (n, V) with the gradient of the sum."""
    n, n_columns = logits.shape
    losses = torch.empty(n, dtype=torch.float32, device=logits.device)
    block = min(triton.next_power_of_2(n_columns), MAX_BLOCK)
    n_warps = max(block // 1024, 4) if torch.version.hip is None else max(block // 2048, 4)
    _kernel[(n,)](
        logits,
        targets,
        losses,
        n_columns,
        logits.stride(0),
        z_loss,
        IGNORE=ignore,
        WRITE=write,
        BLOCK=block,
        num_warps=n_warps,
    )
    return losses
