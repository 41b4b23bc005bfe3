"""Which rows of a parameter this rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a parameter, and the index of the first.

    `fully_shard` splits dim 0 as torch.chunk does: ceil(rows / ranks) each, fewer or none on the last ranks.
    """
    if not isinstance(parameter, DTensor):
        return parameter, 0
    first = 0
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.is_shard(0), f"rows are expected on dim 0, not {placement}"
            per_rank = -(-parameter.shape[0] // parameter.device_mesh.size(axis))
            first = min(per_rank * parameter.device_mesh.get_local_rank(axis), parameter.shape[0])
    return parameter.to_local(), first
