"""Causal attention by PyTorch's kernels, and the document mask.

cuda_attention.py chooses the kernel on a GPU. A CPU has a faster way for short sequences: cpu/attention.py.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.models import cuda_attention


def within_documents(positions: Tensor, *, dense: bool) -> Any:
    """A causal mask that confines attention to each document.

    Args:
        positions: (B, T) int64; a document begins at position 0.
        dense: return a (B, 1, T, T) bool tensor for scaled_dot_product_attention. Otherwise return a BlockMask for
            FlexAttention, which skips blocks of other documents.
    """
    if not dense:
        return cuda_attention.block_mask(positions)
    documents = (positions == 0).cumsum(1)  # (B, T), the index of each token's document
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0) -> Tensor:
    """Attention, (B, T, H, E) and twice (B, S, K, E) -> (B, T, H, E). The queries are those of the last T tokens.

    Args:
        k, v: H / K queries in a row share a head of these.
        mask: from within_documents. None: causal.
    """
    if q.is_cuda or not (mask is None or isinstance(mask, Tensor)):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return cuda_attention.attend(q, k, v, mask, dropout, causal(q, k)).transpose(1, 2)
    if q.shape[2] != k.shape[2]:  # copying shared heads is faster on the CPU than SDPA's enable_gqa
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options = causal(q, k) if mask is None else {"attn_mask": mask}
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **options).transpose(1, 2)


def causal(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Arguments that make SDPA causal. The queries, (B, H, T, E), belong to the last T tokens of `k`."""
    n, of = q.shape[2], k.shape[2]
    if n == of:
        return {"is_causal": True}
    if n == 1:  # it sees all keys: a mask would rule out kernels, and have shared heads copied
        return {}
    return {"attn_mask": torch.ones(n, of, dtype=torch.bool, device=q.device).tril(of - n)}
