"""Masks of documents and windows. On a GPU, FlexAttention skips the blocks of keys that a mask rules out."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries and keys in a block of FlexAttention's mask, its default


def within_documents(positions: Tensor, *, dense: bool, window: int = 0) -> Any:
    """Return a causal mask that keeps attention within a document and a window.

    Args:
        positions: (B, T) int64; a document begins at position 0.
        dense: return a (B, 1, T, T) bool tensor for scaled_dot_product_attention. Otherwise return a BlockMask for
            FlexAttention, which skips blocks of other documents and blocks before the window.
        window: number of keys that a query sees, up to its own; 0: all of its document.
    """
    documents = (positions == 0).cumsum(1)  # (B, T), the index of each token's document; never decreases
    if not dense:
        return block_mask(documents, window)
    mask = (documents[:, :, None] == documents[:, None, :]).tril()
    return (mask.triu(1 - window) if window else mask)[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Compute attention.attend with a BlockMask."""
    from torch.nn.attention.flex_attention import flex_attention

    # only compiled is it a fused kernel; a compiled block includes it
    compute: Any = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
    shared = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out: Tensor = compute(q, k, v, block_mask=mask, **shared)
    return out.transpose(1, 2)


def block_mask(documents: Tensor, window: int) -> Any:
    """Return FlexAttention's BlockMask for causal attention within documents.

    FlexAttention skips blocks of other documents and blocks before the window. The result equals `create_block_mask`'s,
    which first builds the whole (B, T, T) mask. Here, blocks are compared by their first and last document only.

    Args:
        documents: (B, T) int64, the index of each token's document.
        window: as in `within_documents`.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = documents.shape[1]
    first = documents[:, ::BLOCK]  # (B, N), the first document of each block
    ends = torch.arange(BLOCK - 1, length + BLOCK - 1, BLOCK, device=documents.device).clamp(max=length - 1)
    last = documents[:, ends]
    n = first.shape[1]
    earlier = torch.ones(n, n, dtype=torch.bool, device=documents.device).tril(-1)  # keys before the queries
    same = torch.eye(n, dtype=torch.bool, device=documents.device)
    complete = torch.arange(1, n + 1, device=documents.device)[:, None] * BLOCK <= length
    # (B, 1, N, N): queries down, keys across
    full = earlier & complete & (last[:, :, None] == first[:, None, :])
    some = same | earlier & (first[:, :, None] <= last[:, None, :])
    if window:  # full: even the farthest query and key are in the window; some: the closest are
        between = BLOCK * (torch.arange(n, device=documents.device)[:, None] - torch.arange(n, device=documents.device))
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


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function so that selective checkpointing can see, and keep, its result."""
    return torch.compile(function, options={"wrap_inductor_compiled_regions": True})
