"""This rank's part of a parameter: some rows, or with `fsdp.shard_columns` some columns."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def shard_dim(parameter: Tensor) -> int:
    """Return the dim that is split over the ranks; 0 also if none is."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return next((placement.dim for placement in placements if isinstance(placement, Shard)), 0)


def own_part(parameter: Tensor) -> tuple[Tensor, int]:
    """Return this rank's part of a parameter, and the index of its first row (or column, if `shard_dim` is 1).

    `fully_shard` splits a dim as torch.chunk does: ceil(rows / ranks) each, fewer or none on the last ranks.
    """
    if not isinstance(parameter, DTensor):
        return parameter, 0
    first, dim = 0, shard_dim(parameter)
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard():
            per_rank = -(-parameter.shape[dim] // parameter.device_mesh.size(axis))
            first = min(per_rank * parameter.device_mesh.get_local_rank(axis), parameter.shape[dim])
    return parameter.to_local(), first
