"""Causal attention by PyTorch's kernels, with optional windows; document masks; the key-value cache.

cuda_attention.py chooses the kernel on a GPU. On a CPU, cpu/attention.py is faster for short sequences.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def within_documents(positions: Tensor, *, dense: bool, window: int = 0) -> Any:
    """Return a causal mask that keeps attention within a document and a window.

    Args:
        positions: (B, T) int64; a document begins at position 0.
        dense: return a (B, 1, T, T) bool tensor for scaled_dot_product_attention. Otherwise return a BlockMask for
            FlexAttention, which skips blocks of other documents and blocks before the window.
        window: number of keys that a query sees, up to its own; 0: all of its document.
    """
    if not dense:
        from torchtitan_lite.models import cuda_attention

        return cuda_attention.block_mask(positions, window)
    documents = (positions == 0).cumsum(1)  # (B, T), the index of each token's document
    mask = (documents[:, :, None] == documents[:, None, :]).tril()
    return (mask.triu(1 - window) if window else mask)[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0, window: int = 0) -> Tensor:
    """Compute attention, (B, T, H, E) and twice (B, S, K, E) -> (B, T, H, E). Queries belong to the last T tokens.

    Args:
        k, v: each head serves H / K consecutive query heads.
        mask: from within_documents, with the same window. None: causal, within the window.
        window: number of keys that a query sees, up to its own; 0: all.
    """
    if q.is_cuda or not (mask is None or isinstance(mask, Tensor)):
        from torchtitan_lite.models import cuda_attention

        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return cuda_attention.attend(q, k, v, mask, dropout, causal(q, k, window)).transpose(1, 2)
    if q.shape[2] != k.shape[2]:  # copying shared heads is faster on the CPU than SDPA's enable_gqa
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    options = causal(q, k, window) if mask is None else {"attn_mask": mask}
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **options).transpose(1, 2)


def causal(q: Tensor, k: Tensor, window: int = 0) -> dict[str, Any]:
    """Return the arguments that make SDPA causal. Queries (B, H, T, E) belong to the last T tokens of `k`."""
    n, of = q.shape[2], k.shape[2]
    if 0 < window < of:
        return {
            "attn_mask": torch.ones(n, of, dtype=torch.bool, device=q.device).tril(of - n).triu(of - n + 1 - window)
        }
    if n == of:
        return {"is_causal": True}
    if n == 1:  # it sees all keys; a mask would rule out kernels and copy shared heads
        return {}
    return {"attn_mask": torch.ones(n, of, dtype=torch.bool, device=q.device).tril(of - n)}


class KeysValues:
    """The key-value cache of one layer, for generation.

    Args:
        window: number of keys that a token sees, up to its own; older keys are dropped. 0: keep all.
    """

    def __init__(self, window: int = 0) -> None:
        self.length = 0  # tokens so far, including dropped ones
        self._window = window
        self._kept: tuple[Tensor, Tensor] | None = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append T new tokens, (B, T, heads, E) each. Returns the keys and values that any of them can see."""
        self.length += k.shape[1]
        if self._kept is not None:
            k, v = torch.cat((self._kept[0], k), dim=1), torch.cat((self._kept[1], v), dim=1)
        first = max(k.shape[1] + 1 - self._window, 0) if self._window else 0  # the first one that the next token sees
        self._kept = k[:, first:], v[:, first:]
        return k, v
