"""Causal attention, by PyTorch's kernels or, on the CPU, by large matrix products over blocks of queries.
(cuda_attention.py: on a GPU.)

PyTorch's CPU flash kernel multiplies small tiles and reaches a fifth of the speed of a batched product in bfloat16
(docs/lab). `block_attention` multiplies each block of queries by all keys up to the block's end and masks only the
last square. It keeps half of the (T, T) probabilities for backward: faster, but too much memory for long sequences.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = {2: 128, 4: 64, 8: 64}  # queries, by bytes of an element: others were slower (benchmarks.candidates)
MAX_SEQ_LEN = 1024  # beyond this, SDPA is as fast and stores nothing of size (T, T)


def block_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(E)) v, softmax in float32; (B, T, H, E) and twice (B, T, K, E) -> (B, T, H, E)."""
    shared = q.unflatten(2, (k.shape[2], -1))  # (B, T, K, G, E): G heads share keys, and become rows of one product
    k, v = (t.transpose(1, 2).flatten(0, 1) for t in (k, v))
    out = _BlockAttention.apply(shared.transpose(1, 2).flatten(0, 1).flatten(1, 2), k, v)  # type: ignore[no-untyped-call]
    return out.unflatten(0, (len(q), -1)).unflatten(2, (q.shape[1], -1)).transpose(1, 2).flatten(2, 3)


class _BlockAttention(torch.autograd.Function):
    """(N, T G, E) queries, (N, T, E) keys and values -> (N, T G, E). N = B K; the G rows of a token are adjacent."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, kept, empty, scale = torch.empty_like(q), [], q.new_empty(()), 1 / math.sqrt(q.shape[2])
        future = torch.ones(BLOCK[q.itemsize], BLOCK[q.itemsize], dtype=torch.bool).triu(1)
        future = future.repeat_interleave(q.shape[1] // k.shape[1], 0)
        for start, end, rows in _blocks(q, k):
            scores = torch.baddbmm(empty, q[:, rows], k[:, :end].transpose(1, 2), beta=0, alpha=scale)
            scores[:, :, start:].masked_fill_(future[: scores.shape[1], : end - start], -math.inf)
            torch.softmax(scores, -1, out=scores)  # computed in float32, then rounded
            out[:, rows] = torch.bmm(scores, v[:, :end])  # Dynamo takes no slice for `out=`
            kept.append(scores)
        ctx.save_for_backward(q, k, v, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (d_out,) = grads
        q, k, v, *kept = ctx.saved_tensors
        scale = 1 / math.sqrt(q.shape[2])
        dq = torch.empty_like(q)
        # every later block adds to a key's gradient: sum in float32
        dk, dv = (torch.zeros(t.shape, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (k, v))
        for (_, end, rows), probabilities in zip(_blocks(q, k), kept, strict=True):
            ds = torch.bmm(d_out[:, rows], v[:, :end].transpose(1, 2))
            torch._softmax_backward_data(ds, probabilities, -1, ds.dtype, grad_input=ds)
            dq[:, rows] = torch.bmm(ds, k[:, :end])
            _add_product(dk[:, :end], ds.transpose(1, 2), q[:, rows])
            _add_product(dv[:, :end], probabilities.transpose(1, 2), d_out[:, rows])
        return dq.mul_(scale), dk.mul_(scale).to(k.dtype), dv.to(v.dtype)


def _blocks(q: Tensor, k: Tensor) -> list[tuple[int, int, slice]]:
    """The first token of each block, the token after its last, and its rows of queries."""
    length, group = k.shape[1], q.shape[1] // k.shape[1]
    ends = [(start, min(start + BLOCK[q.itemsize], length)) for start in range(0, length, BLOCK[q.itemsize])]
    return [(start, end, slice(start * group, end * group)) for start, end in ends]


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one @ other; in the same dtype, within the product."""
    _ = total.baddbmm_(one, other) if total.dtype == one.dtype else total.add_(torch.bmm(one, other))


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    dropout: float = 0.0,
    *,
    by_blocks: bool = False,
    widened: bool = False,
) -> Tensor:
    """Causal attention, (B, T, H, E) and twice (B, S, K, E) -> (B, T, H, E). The queries are those of the last tokens.

    Args:
        k, v: H / K queries in a row share a head of these.
        mask: from within_documents.
        by_blocks, widened: use block_attention where it is faster; compute in float32, and round the result.
    """
    if q.is_cuda or not (mask is None or isinstance(mask, Tensor)):
        from torchtitan_lite.models import cuda_attention

        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return cuda_attention.attend(q, k, v, mask, dropout, causal(q, k)).transpose(1, 2)
    dtype = q.dtype
    q, k, v = (t.float() if widened else t for t in (q, k, v))
    plain = mask is None and dropout == 0 and q.shape[1] == k.shape[1] and q.device.type == "cpu"
    if by_blocks and plain and q.shape[1] <= MAX_SEQ_LEN:
        return block_attention(q, k, v).to(dtype)
    if q.shape[2] != k.shape[2]:  # copying shared heads is faster on the CPU than SDPA's enable_gqa
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options = causal(q, k) if mask is None else {"attn_mask": mask}
    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **options)
    return mixed.transpose(1, 2).to(dtype)


def causal(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Arguments that make SDPA causal. The queries, (B, H, T, E), belong to the last T tokens of `k`."""
    n, of = q.shape[2], k.shape[2]
    if n == of:
        return {"is_causal": True}
    return {"attn_mask": torch.ones(n, of, dtype=torch.bool, device=q.device).tril(of - n)}
