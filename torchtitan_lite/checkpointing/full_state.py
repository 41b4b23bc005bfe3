"""Loads full state dicts: rank 0 sends each rank its rows of whole tensors, or the rank reads them itself."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.distributed.sharding import own_part, shard_dim

CHUNK_BYTES = 64 << 20  # bytes sent at a time


def broadcast_rows(whole: Tensor | None, target: Tensor, buffer: Tensor) -> None:
    """Fill this rank's rows of a tensor from the whole tensor on rank 0. Collective.

    Example: of a (5, 4) tensor on 2 ranks, rank 1 has rows 3 and 4, which are elements 12 to 19. With pieces of 8
    elements:

        piece        0 to 7    8 to 15     16 to 19
        to rank 0    all       8 to 11     none
        to rank 1    none      12 to 15    all

    Split by columns, rank 1 has columns 2 and 3 of 5 rows of width 4: it takes `[:, 2:4]` of each piece of 2 rows.

    Args:
        whole: on the CPU of rank 0, None elsewhere.
        buffer: (CHUNK_BYTES,) uint8 on this rank's device. All pieces pass through it, so nothing else is allocated.
    """
    shard, first = own_part(target)
    dim = shard_dim(target)
    # (rows, width): with dim 0 the tensor is one row, and this rank has its elements `first` to `last`
    width, first = math.prod(target.shape[dim:]), first * math.prod(target.shape[dim + 1 :])
    last = first + math.prod(shard.shape[dim:])
    local = shard.view(-1, last - first) if last > first else None
    pieces = buffer.view(target.dtype)
    start = 0
    while start < target.numel():  # a piece is whole rows, or part of one row
        row, column = divmod(start, width)
        whole_rows = len(pieces) // width * width
        piece = pieces[: min(whole_rows, target.numel() - start) or min(len(pieces), width - column)]
        if whole is not None:
            piece.copy_(whole.view(-1)[start : start + len(piece)])
        dist.broadcast(piece.view(torch.uint8), src=0)  # gloo has no int16
        rows = piece.view(-1, min(len(piece), width))
        begin, end = max(first, column), min(last, column + rows.shape[1])
        if local is not None and begin < end:
            local[row : row + len(rows), begin - first : end - first].copy_(rows[:, begin - column : end - column])
        start += len(piece)
        progress.advance(piece.nbytes)


def copy_rows(whole: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Fill this rank's rows from whole tensors that it can read itself. Reads lazy tensors one at a time."""
    for name, target in targets.items():
        rows, first = own_part(target)
        dim = shard_dim(target)
        with progress.working(f"reading {name}"):
            rows.copy_(whole[name].narrow(dim, first, rows.shape[dim]))
