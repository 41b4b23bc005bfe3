"""Patterns in [fsdp] that override the dtypes or the sharding of some parameters."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import Shard

from torchtitan_lite.config.patterns import first_match, unused
from torchtitan_lite.config.schema import FsdpConfig
from torchtitan_lite.errors import ConfigError


def dtypes_of_group(
    group: str, parameters: list[str], config: FsdpConfig
) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
    """Return a group's param_dtype, reduce_dtype and output_dtype.

    Raises:
        ConfigError: a pattern matches only a part of the group.
    """
    first_with: dict[tuple[str, str, str], str] = {}
    for name in parameters:
        dtypes = {key: getattr(config, key) for key in ("param_dtype", "reduce_dtype", "output_dtype")}
        i = first_match(name, [override.match for override in config.precision_overrides])
        if i is not None:
            dtypes |= config.precision_overrides[i].model_dump(exclude={"match"}, exclude_none=True)
        first_with.setdefault((dtypes["param_dtype"], dtypes["reduce_dtype"], dtypes["output_dtype"]), name)
    if len(first_with) > 1:
        one, other = list(first_with.values())[:2]
        raise ConfigError(
            f"fsdp.precision_overrides: {one} and {other} would get different dtypes, but group '{group}' is "
            f"gathered and cast together; a pattern has to match all of: {', '.join(parameters)}"
        )
    param, reduce, output = next(iter(first_with))
    return getattr(torch, param), getattr(torch, reduce), getattr(torch, output) if output else None


def column_placement(
    model: nn.Module, patterns: Sequence[str], ranks: int
) -> Callable[[nn.Parameter], Shard | None] | None:
    """Return fully_shard's placement function, which splits matching matrices at dim 1. None: split all at dim 0.

    A stack of experts (E, M, N) with fewer experts than ranks is also split at dim 1, if `ranks` divides it. Otherwise
    some ranks would have no part of it.

    Raises:
        ConfigError: a pattern matches no matrix, or `ranks` does not divide dim 1 of a matching matrix.
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
