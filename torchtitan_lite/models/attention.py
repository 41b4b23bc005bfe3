"""Causal attention by PyTorch's kernels. masks.py has documents and windows on a GPU.

On a GPU, SDPA's kernels are tried in the order cuDNN, flash, efficient, math: on an H100, cuDNN is twice as fast as
PyTorch's flash kernel (pytorch issue 142132). On GPUs where it is slower, flash comes first. (torch's own order depends
on its version.) On a CPU, cpu/attention.py replaces `attend` by functions that are faster for short sequences.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_lite.models import masks
from torchtitan_lite.models.cache import KeysValues as KeysValues  # families import it from here
from torchtitan_lite.models.kernels import flash_supports_gqa, prefers_cudnn

WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0, window: int = 0) -> Tensor:
    """Compute attention, (B, T, H, E) and twice (B, S, K, E) -> (B, T, H, E). Queries belong to the last T tokens.

    Args:
        k, v: each head serves H / K consecutive query heads.
        mask: from masks.within_documents, with the same window. None: causal, within the window.
        window: number of keys that a query sees, up to its own; 0: all.
    """
    if mask is not None and not isinstance(mask, Tensor):
        return masks.attend(q, k, v, mask)
    options = causal(q, k, window) if mask is None else {"attn_mask": mask}
    shared = q.shape[2] != k.shape[2]
    # With a mask or on a CPU, enable_gqa is slow (it computes all T x S scores): copy the shared heads instead.
    grouped = shared and q.is_cuda and "attn_mask" not in options and flash_supports_gqa(q)
    if shared and not grouped:
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **options).transpose(1, 2)
    first = [SDPBackend.CUDNN_ATTENTION] if prefers_cudnn(q, options) else []
    with sdpa_kernel(first + WITHOUT_CUDNN, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, enable_gqa=grouped, **options)
    return out.transpose(1, 2)


def causal(q: Tensor, k: Tensor, window: int = 0) -> dict[str, Any]:
    """Return the arguments that make SDPA causal. Queries (B, T, H, E) belong to the last T tokens of `k`."""
    n_queries, n_keys = q.shape[1], k.shape[1]
    first = n_keys - n_queries  # the first query's own key
    if n_queries in (1, n_keys) and not 0 < window < n_keys:
        return {"is_causal": True} if first == 0 else {}  # one query sees all keys; a mask would rule out kernels
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device).tril(first)
    return {"attn_mask": seen.triu(first + 1 - window) if window else seen}
