"""Causal attention by PyTorch's kernels, and the key-value cache. masks.py has documents and windows on a GPU.

On a GPU, SDPA's kernels are tried in the order cuDNN, flash, efficient, math: on an H100 with heads of 128, cuDNN is
twice as fast as PyTorch's flash kernel (pytorch issue 142132). On other GPUs flash comes first: on an A100, cuDNN ran
at 0.82 of flash's speed. torch's own order is similar, but depends on its version. On a CPU, cpu/attention.py replaces
`attend` by functions that are faster for short sequences.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_lite.models import masks

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


def prefers_cudnn(q: Tensor, options: dict[str, Any]) -> bool:
    """Return whether to try cuDNN first, for queries (B, H, T, E).

    cuDNN before 9.15.1 is wrong for lengths that are not multiples of 128; later versions return NaN for some masks
    (pytorch issues 169849, 196678).
    """
    return "is_causal" in options and q.shape[2] % 128 == 0 and cudnn_is_faster()


def flash_supports_gqa(q: Tensor) -> bool:
    """Return whether the flash kernel supports GQA. (If it does, so does cuDNN's.)

    Follows torch's sdp_utils.cpp, because torch.compile can't trace can_use_flash_attention.
    """
    # above a head_dim of 192, some GPUs have no gradients
    return flash_works() and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 192


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def flash_works() -> bool:
    """Return whether PyTorch has a flash kernel, and the GPU is an A100 or newer."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability() >= (8, 0)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def cudnn_is_faster() -> bool:
    """Return whether the GPU has compute capability 9 or 10, for which torch also prefers cuDNN."""
    return torch.cuda.get_device_capability()[0] in (9, 10)


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
