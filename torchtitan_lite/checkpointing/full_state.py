"""Loads full state dicts: rank 0 broadcasts whole tensors and each rank keeps its rows, or each rank reads its own."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.distributed.sharding import own_part, shard_dim

CHUNK_BYTES = 64 << 20  # broadcast at a time


def broadcast_rows(whole: Tensor | None, target: Tensor, buffer: Tensor) -> None:
    """Fill this rank's rows of a tensor from the whole tensor on rank 0. Collective.

    Example: of a (5, 4) tensor on 2 ranks, rank 1 has rows 3 and 4, which are elements 12 to 19. With chunks of 8
    elements:

        chunk           0 to 7    8 to 15     16 to 19
        rank 0 keeps    all       8 to 11     none
        rank 1 keeps    none      12 to 15    all

    Split by columns, rank 1 has columns 2 and 3 of 5 rows of width 4: it takes `[:, 2:4]` of each chunk of 2 rows.

    Args:
        whole: on the CPU of rank 0, None elsewhere.
        buffer: (CHUNK_BYTES,) uint8 on this rank's device. All chunks pass through it, so nothing else is allocated.
    """
    shard, first = own_part(target)
    dim = shard_dim(target)
    # View the tensor as a matrix of rows of `width` elements, and the shard as its columns first:last. If dim 0 is
    # sharded, this matrix has only one row: the whole tensor.
    width, first = math.prod(target.shape[dim:]), first * math.prod(target.shape[dim + 1 :])
    last = first + math.prod(shard.shape[dim:])
    local = shard.view(-1, last - first) if last > first else None
    space = buffer.view(target.dtype)
    start = 0
    while start < target.numel():  # a chunk is whole rows, or part of one row
        row, column = divmod(start, width)
        in_whole_rows = len(space) // width * width  # elements; 0 if not even one row fits
        chunk = space[: min(in_whole_rows, target.numel() - start) or min(len(space), width - column)]
        if whole is not None:
            chunk.copy_(whole.view(-1)[start : start + len(chunk)])
        dist.broadcast(chunk.view(torch.uint8), src=0)  # as bytes: gloo can't broadcast every dtype (int16)
        rows = chunk.view(-1, min(len(chunk), width))
        begin, end = max(first, column), min(last, column + rows.shape[1])
        if local is not None and begin < end:
            local[row : row + len(rows), begin - first : end - first].copy_(rows[:, begin - column : end - column])
        start += len(chunk)
        progress.advance(chunk.nbytes)


def copy_rows(whole: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy this rank's rows from whole tensors on this rank, one tensor at a time, so `whole` may load lazily."""
    for name, target in targets.items():
        rows, first = own_part(target)
        dim = shard_dim(target)
        with progress.working(f"reading {name}"):
            rows.copy_(whole[name].narrow(dim, first, rows.shape[dim]))
