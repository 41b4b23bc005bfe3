"""Which part of a parameter this rank holds: some rows, or with `fsdp.shard_columns` some columns."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lite.config.patterns import first_match, unused
from torchtitan_lite.errors import ConfigError


def shard_dim(parameter: Tensor) -> int:
    """The dim that is split over the ranks; 0 also if none is."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return next((placement.dim for placement in placements if isinstance(placement, Shard)), 0)


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a parameter, and the index of its first row; of `shard_dim`, where that is not dim 0.

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


def column_placement(
    model: nn.Module, patterns: Sequence[str], ranks: int
) -> Callable[[nn.Parameter], Shard | None] | None:
    """For `fully_shard`: split the matrices that match a pattern at dim 1. None: all at dim 0.

    A stack of experts (E, M, N) with fewer experts than ranks is split at dim 1 too, if that divides: otherwise some
    ranks would hold nothing of it.

    Raises:
        ConfigError: a pattern matches no matrix, or one whose dim 1 `ranks` does not divide.
    """
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    wrong = list(unused("fsdp.shard_columns", list(matrices), patterns, field="", what="matrix"))
    chosen = {name: p for name, p in matrices.items() if first_match(name, patterns) is not None}
    for name, parameter in chosen.items():
        if (columns := parameter.shape[1]) % ranks:
            wrong.append(
                f"fsdp.shard_columns: {name} has {columns} columns, which fsdp.dp_shard = {ranks} does not divide; "
                f"fsdp.dp_shard = {math.gcd(columns, ranks)} works, or a pattern without {name}"
            )
    if wrong:
        raise ConfigError("\n  ".join(wrong))
    few = [p for p in matrices.values() if p.ndim == 3 and len(p) < ranks and p.shape[1] % ranks == 0]
    by_columns = {id(parameter) for parameter in (*chosen.values(), *few)}
    return (lambda parameter: Shard(1) if id(parameter) in by_columns else None) if by_columns else None
