"""Attention on a GPU: PyTorch's fused kernels, and FlexAttention within documents and windows.

SDPA's kernels are tried in the order cuDNN, flash, efficient, math: on an H100 with heads of 128, cuDNN is twice as
fast as PyTorch's flash kernel (pytorch issue 142132). On other GPUs flash comes first: on an A100, cuDNN ran at 0.82 of
flash's speed. torch's own order is similar, but depends on its version.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BLOCK = 128  # queries and keys in a block of FlexAttention's mask, its default
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, causal: dict[str, Any]) -> Tensor:
    """Compute attention of (B, H, T, E) queries, (B, K, S, E) keys and values -> (B, H, T, E); H is a multiple of K.

    Args:
        mask: from attention.within_documents, or None.
        causal: without a mask, the arguments that make SDPA causal.
    """
    shared = q.shape[1] != k.shape[1]
    if mask is not None and not isinstance(mask, Tensor):
        return _flex_attention()(q, k, v, block_mask=mask, **({"enable_gqa": True} if shared else {}))
    options = causal if mask is None else {"attn_mask": mask}
    # Without a fused kernel, enable_gqa computes all T x S scores: copying the shared heads is then better.
    grouped = shared and "attn_mask" not in options and _flash_supports_gqa(q)
    if shared and not grouped:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    # cuDNN before 9.15.1 is wrong for lengths that are not multiples of 128; later versions return NaN for some masks
    # (pytorch issues 169849, 196678)
    prefers_cudnn = "is_causal" in options and q.shape[2] % 128 == 0 and cudnn_is_faster()
    first = [SDPBackend.CUDNN_ATTENTION] if prefers_cudnn else []
    with sdpa_kernel(first + WITHOUT_CUDNN, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, enable_gqa=grouped, **options)


def attend_with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Compute unscaled attention with scores q k^T + bias, (B, H, T, S).

    Of the kernels, only the efficient and the math one give the bias a gradient.
    """
    with sdpa_kernel(WITHOUT_CUDNN, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)


def _flash_supports_gqa(q: Tensor) -> bool:
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


def block_mask(positions: Tensor, window: int = 0) -> Any:
    """Return FlexAttention's BlockMask for causal attention within documents.

    FlexAttention skips blocks of other documents and blocks before the window. The result equals `create_block_mask`'s,
    which first builds the whole (B, T, T) mask. Here, blocks are compared by their first and last document only.

    Args:
        positions: (B, T) int64; a document begins at position 0.
        window: number of keys that a query sees, its own included; 0: all of its document.
    """
    from torch.nn.attention.flex_attention import BlockMask

    documents = (positions == 0).cumsum(1)  # (B, T), the index of each token's document; never decreases
    length = documents.shape[1]
    first = documents[:, ::BLOCK]  # (B, N), the first document of each block
    ends = torch.arange(BLOCK - 1, length + BLOCK - 1, BLOCK, device=positions.device).clamp(max=length - 1)
    last = documents[:, ends]
    n = first.shape[1]
    earlier = torch.ones(n, n, dtype=torch.bool, device=positions.device).tril(-1)  # keys before the queries
    same = torch.eye(n, dtype=torch.bool, device=positions.device)
    complete = torch.arange(1, n + 1, device=positions.device)[:, None] * BLOCK <= length
    # (B, 1, N, N): queries down, keys across
    full = earlier & complete & (last[:, :, None] == first[:, None, :])
    some = same | earlier & (first[:, :, None] <= last[:, None, :])
    if window:  # full: even the farthest query and key are in the window; some: the closest are
        between = BLOCK * (torch.arange(n, device=positions.device)[:, None] - torch.arange(n, device=positions.device))
        full &= between + BLOCK <= window
        some &= same | (between - BLOCK + 1 < window)
    full = full[:, None]
    some = some[:, None] & ~full

    def allowed(batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        within = (q >= k) & (documents[batch, q] == documents[batch, k])
        return within & (q - k < window) if window else within

    return BlockMask.from_kv_blocks(
        *_in_order(some), *_in_order(full), BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=(length, length)
    )


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks that each query block needs, (B, 1, N), and their indices first, (B, 1, N, N)."""
    chosen = blocks.to(torch.int32)
    order = torch.argsort(chosen, dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function so that selective checkpointing can see, and keep, its result."""
    try:
        return torch.compile(function, options={"wrap_inductor_compiled_regions": True})
    except RuntimeError:  # this torch has no such option
        return torch.compile(function)


@functools.cache
def _flex_attention_compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return compiled(flex_attention)


def _flex_attention() -> Callable[..., Any]:
    """Return FlexAttention, compiled: only then is it a fused kernel."""
    if torch.compiler.is_compiling():  # the block's compilation includes it
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention
    return _flex_attention_compiled()
