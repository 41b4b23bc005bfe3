"""This rank's part of a parameter: some rows, or with `fsdp.shard_columns` some columns."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def shard_range(size: int, n_shards: int, shard: int) -> range:
    """Return a shard's rows. As torch.chunk: ceil(size / n_shards) each, fewer or none in the last shards."""
    per_shard = -(-size // n_shards)
    return range(size)[per_shard * shard : per_shard * (shard + 1)]


def shard_dim(parameter: Tensor) -> int:
    """Return the dim that is split over the ranks; 0 also if none is."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return next((placement.dim for placement in placements if isinstance(placement, Shard)), 0)


def own_part(parameter: Tensor) -> tuple[Tensor, int]:
    """Return this rank's part of a parameter, and the index of its first row (or column, if `shard_dim` is 1)."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    first, mesh = 0, parameter.device_mesh
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            first = shard_range(parameter.shape[placement.dim], mesh.size(axis), mesh.get_local_rank(axis)).start
    return parameter.to_local(), first
