"""Causal attention, by PyTorch's kernels or, on the CPU, by large matrix products over blocks of queries.
(cuda_attention.py: on a GPU.)

PyTorch's CPU flash kernel multiplies small tiles and reaches a fifth of the speed of a batched product in bfloat16
(BENCHMARKS.md). `block_attention` multiplies each block of queries by all keys up to the block's end and masks only the
last square. It keeps half of the (T, T) probabilities for backward: faster, but too much memory for long sequences.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # queries; 64 and 256 were slower
MAX_SEQ_LEN = 1024  # beyond this, SDPA is as fast and stores nothing of size (T, T)


def block_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(E)) v with softmax in float32; (B, H, T, E) each -> (B, H, T, E), any float dtype."""
    batched = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))  # (N, T, E), N = B H
    return _BlockAttention.apply(*batched).view(q.shape)  # type: ignore[no-untyped-call]


class _BlockAttention(torch.autograd.Function):
    """(N, T, E) queries, keys and values -> (N, T, E)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, width = q.shape[1:]
        out, kept = torch.empty_like(q), []
        future = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).triu(1)
        for start in range(0, length, BLOCK):
            end = min(start + BLOCK, length)
            scores = torch.baddbmm(
                q.new_empty(()), q[:, start:end], k[:, :end].transpose(1, 2), beta=0, alpha=1 / math.sqrt(width)
            )  # (N, end - start, end)
            scores[:, :, start:].masked_fill_(future[: end - start, : end - start], -math.inf)
            probabilities = torch.softmax(scores, -1)  # computed in float32, then rounded
            out[:, start:end] = torch.bmm(probabilities, v[:, :end])
            kept.append(probabilities)
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (d_out,) = grads
        q, k, v, *kept = ctx.saved_tensors
        length, scale = q.shape[1], 1 / math.sqrt(q.shape[2])
        dq = torch.empty_like(q)
        # every later block adds to a key's gradient: sum in float32
        dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
        for start, probabilities in zip(range(0, length, BLOCK), kept, strict=True):
            end = min(start + BLOCK, length)
            d_block = d_out[:, start:end]
            dp = torch.bmm(d_block, v[:, :end].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, probabilities, -1, dp.dtype)
            dq[:, start:end] = torch.bmm(ds, k[:, :end])
            dk[:, :end] += torch.bmm(ds.transpose(1, 2), q[:, start:end])
            dv[:, :end] += torch.bmm(probabilities.transpose(1, 2), d_block)
        return dq.mul_(scale), dk.mul_(scale).to(k.dtype), dv.to(v.dtype)


class KeysValues:
    """The key-value cache of one layer, for generation."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Cached tokens."""
        return 0 if self._kept is None else self._kept[0].shape[1]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append T new tokens, (B, T, heads, E) each. Returns the keys and values of all tokens."""
        if self._kept is not None:
            k, v = torch.cat((self._kept[0], k), dim=1), torch.cat((self._kept[1], v), dim=1)
        self._kept = k, v
        return k, v


def within_documents(positions: Tensor, *, dense: bool) -> Any:
    """A causal mask that confines attention to each document.

    Args:
        positions: (B, T) int64; a document begins at position 0.
        dense: return a (B, 1, T, T) bool tensor for scaled_dot_product_attention. Otherwise return a BlockMask for
            FlexAttention, which skips blocks of other documents.
    """
    if not dense:
        from torchtitan_lite.models import cuda_attention

        return cuda_attention.block_mask(positions)
    documents = (positions == 0).cumsum(1)  # (B, T), the index of each token's document
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0, *, by_blocks: bool = False
) -> Tensor:
    """Causal attention, (B, T, H, E) and twice (B, S, K, E) -> (B, T, H, E). The queries are those of the last tokens.

    Args:
        k, v: H / K queries in a row share a head of these.
        mask: from within_documents.
        by_blocks: use block_attention where it is faster.
    """
    if q.is_cuda or not (mask is None or isinstance(mask, Tensor)):
        from torchtitan_lite.models import cuda_attention

        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return cuda_attention.attend(q, k, v, mask, dropout, causal(q, k)).transpose(1, 2)
    if q.shape[2] != k.shape[2]:  # copying shared heads is faster on the CPU than SDPA's enable_gqa
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    plain = mask is None and dropout == 0 and q.shape == k.shape and q.device.type == "cpu"
    if by_blocks and plain and q.shape[2] <= MAX_SEQ_LEN:
        mixed = block_attention(q, k, v)
    else:
        options = causal(q, k) if mask is None else {"attn_mask": mask}
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **options)
    return mixed.transpose(1, 2)


def causal(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Arguments that make SDPA causal. The queries, (B, H, T, E), belong to the last T tokens of `k`."""
    n, of = q.shape[2], k.shape[2]
    if n == of:
        return {"is_causal": True}
    return {"attn_mask": torch.ones(n, of, dtype=torch.bool, device=q.device).tril(of - n)}
