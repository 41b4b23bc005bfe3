"""Causal attention by large matmuls over blocks of queries.

PyTorch's CPU flash kernel multiplies small tiles (docs/lab). `block_attention` multiplies each block of queries by all
keys that they see, and masks only the last square. It keeps half of the (T, T) probabilities for backward: faster, but
too much memory for long sequences.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.models import attention as plain

BLOCK = {2: 128, 4: 64, 8: 64}  # queries, by bytes per element; other sizes were slower (docs/lab/speed.md)
MAX_SEQ_LEN = 1024  # beyond this, SDPA is as fast and stores nothing of size (T, T)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0, window: int = 0) -> Tensor:
    """Compute models.attention.attend, in blocks where that is faster."""
    causal, length = mask is None and dropout == 0 and q.shape[1] == k.shape[1], q.shape[1]
    seen = min(length, window or length)
    if causal and q.device.type == "cpu" and not _varies(length) and length * seen <= MAX_SEQ_LEN**2:
        return block_attention(q, k, v, window)
    return plain.attend(q, k, v, mask=mask, dropout=dropout, window=window)


def _varies(length: int) -> bool:
    """Return whether a block is being compiled for all lengths. Block attention would recompile for each length."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return not statically_known_true(length < 2**32)


def block_attention(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Compute causal attention, softmax in float32; (B, T, H, E) and twice (B, T, K, E) -> (B, T, H, E)."""
    shared = q.unflatten(2, (k.shape[2], -1))  # (B, T, K, G, E): G heads share keys, and become rows of one matmul
    k, v = (t.transpose(1, 2).flatten(0, 1) for t in (k, v))
    out = _BlockAttention.apply(shared.transpose(1, 2).flatten(0, 1).flatten(1, 2), k, v, window)  # type: ignore[no-untyped-call]
    return out.unflatten(0, (len(q), -1)).unflatten(2, (q.shape[1], -1)).transpose(1, 2).flatten(2, 3)


class _BlockAttention(torch.autograd.Function):
    """(N, T G, E) queries, (N, T, E) keys and values -> (N, T G, E). N = B K; the G rows of a token are adjacent."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        out, kept, empty, scale = torch.empty_like(q), [], q.new_empty(()), 1 / math.sqrt(q.shape[2])
        future = torch.ones(BLOCK[q.itemsize], BLOCK[q.itemsize], dtype=torch.bool).triu(1)
        group = q.shape[1] // k.shape[1]
        future = future.repeat_interleave(group, 0)
        for first, start, end, rows in _blocks(q, k, window):
            scores = torch.baddbmm(empty, q[:, rows], k[:, first:end].transpose(1, 2), beta=0, alpha=scale)
            scores[:, :, start - first :].masked_fill_(future[: scores.shape[1], : end - start], -math.inf)
            if window and first < end - window:  # only the block's first queries see these keys
                past = torch.ones(end - start, end - window - first, dtype=torch.bool).tril(start - window - first)
                scores[:, :, : past.shape[1]].masked_fill_(past.repeat_interleave(group, 0), -math.inf)
            torch.softmax(scores, -1, out=scores)  # computed in float32, then rounded
            out[:, rows] = torch.bmm(scores, v[:, first:end])  # Dynamo takes no slice for `out=`
            kept.append(scores)
        ctx.window = window
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (d_out,) = grads
        q, k, v, *kept = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[2])
        dq = torch.empty_like(q)
        # sum in float32, because every later block adds to a key's gradient
        dk, dv = (torch.zeros(t.shape, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (k, v))
        for (first, _, end, rows), probabilities in zip(_blocks(q, k, ctx.window), kept, strict=True):
            ds = torch.bmm(d_out[:, rows], v[:, first:end].transpose(1, 2))
            torch._softmax_backward_data(ds, probabilities, -1, ds.dtype, grad_input=ds)  # in place
            dq[:, rows] = torch.bmm(ds, k[:, first:end])
            _add_matmul_(dk[:, first:end], ds.transpose(1, 2), q[:, rows])
            _add_matmul_(dv[:, first:end], probabilities.transpose(1, 2), d_out[:, rows])
        return dq.mul_(scale), dk.mul_(scale).to(k.dtype), dv.to(v.dtype), None


def _blocks(q: Tensor, k: Tensor, window: int) -> list[tuple[int, int, int, slice]]:
    """Return for each block: the first token that it sees, its token range (start, end), its rows of queries."""
    length, group = k.shape[1], q.shape[1] // k.shape[1]
    ends = [(start, min(start + BLOCK[q.itemsize], length)) for start in range(0, length, BLOCK[q.itemsize])]
    firsts = [max(start + 1 - window, 0) if window else 0 for start, _ in ends]
    return [
        (first, *block, slice(block[0] * group, block[1] * group)) for first, block in zip(firsts, ends, strict=True)
    ]


def _add_matmul_(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add one @ other to `total`; if the dtypes are equal, within the matmul."""
    _ = total.baddbmm_(one, other) if total.dtype == one.dtype else total.add_(torch.bmm(one, other))
