"""Causal attention on the CPU by plain matrix products, a block of queries at a time.

PyTorch's flash kernel for the CPU multiplies small tiles, and reaches a fifth of what one batched product does in
bfloat16 (BENCHMARKS.md). Here a block of queries meets all keys up to its own end: four large products where the kernel
has many small ones, and only the last square of each block is masked. Half of the (T, T) probabilities are kept for
backward, in the dtype of the computation: faster than computing them again, and too much memory for long sequences.
"""

import math
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries; 64 and 256 were slower
MAX_SEQ_LEN = 1024  # beyond, SDPA is as fast and keeps nothing of size (T, T)


def block_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of each token to itself and those before it: softmax(q k^T / sqrt(E)) v, softmax in float32.

    Queries, keys and values, (B, H, T, E) each, any float dtype -> (B, H, T, E).
    """
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
            probabilities = torch.softmax(scores, -1)  # in float32, rounded at its end
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
        # a key is used by every later block: their sum is formed in float32
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
