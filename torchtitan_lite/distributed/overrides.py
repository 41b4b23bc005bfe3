"""Options of [fsdp] that few runs use: dtypes by pattern, sharding by columns, resharding over N ranks."""

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from torchtitan_lite.config.patterns import first_match, unused
from torchtitan_lite.config.schema import FsdpConfig

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype | None]


def dtypes_of(parameter: str, config: FsdpConfig) -> Dtypes:
    """Return param_dtype, reduce_dtype and output_dtype (None: param_dtype) of the group with this parameter."""
    i = first_match(parameter, [override.match for override in config.precision_overrides])
    override = None if i is None else config.precision_overrides[i]
    keys = "param_dtype", "reduce_dtype", "output_dtype"
    param, reduce, output = (getattr(override, key, None) or getattr(config, key) for key in keys)
    return getattr(torch, param), getattr(torch, reduce), getattr(torch, output) if output else None


def wrong_overrides(groups: Mapping[str, Sequence[str]], config: FsdpConfig) -> Iterator[str]:
    """Yield a message for each pattern of fsdp.precision_overrides that matches nothing, or only a part of a group.

    Args:
        groups: the parameters of each group, by the group's name.
    """
    for group, (one, *others) in groups.items():
        other = next((name for name in others if dtypes_of(name, config) != dtypes_of(one, config)), None)
        if other is not None:
            yield (
                f"fsdp.precision_overrides: {one} and {other} would get different dtypes, but group '{group}' is "
                f"gathered and cast together; a pattern has to match all of: {', '.join([one, *others])}"
            )
    names = [name for parameters in groups.values() for name in parameters]
    yield from unused("fsdp.precision_overrides", names, [override.match for override in config.precision_overrides])


def cast_inputs(modules: Sequence[nn.Module], dtype: torch.dtype) -> None:
    """Cast the activations that come from a group with a different dtype.

    `cast_forward_inputs` would also cast the other arguments, but rotary tables must stay float32.
    """
    for module in modules:
        module.register_forward_pre_hook(functools.partial(_cast_first, dtype))


def _cast_first(dtype: torch.dtype, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    first, *others = args
    return (first.to(dtype) if first.is_floating_point() else first, *others)


@contextlib.contextmanager
def one_post_forward_mesh(reshard_after_forward: bool | int | str) -> Iterator[None]:
    """With a number, make all calls of `fully_shard` in this context share one mesh of so many ranks.

    torch (2.11 to 2.13) makes a DeviceMesh in every call with a number: two process groups, and on GPUs NCCL
    communicators, per group of parameters. All of them are the same, so one is enough.
    """
    if isinstance(reshard_after_forward, bool | str):
        yield
        return
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    make, meshes = module._get_post_forward_mesh_info, dict[bool | int, Any]()

    def shared(reshard: bool | int, mesh_info: Any) -> Any:
        if reshard not in meshes:
            meshes[reshard] = make(reshard, mesh_info)
        return meshes[reshard]

    module._get_post_forward_mesh_info = shared
    try:
        yield
    finally:
        module._get_post_forward_mesh_info = make


def wrong_columns(model: nn.Module, patterns: Sequence[str], ranks: int) -> Iterator[str]:
    """Yield a message for each pattern of fsdp.shard_columns without a matrix, and each matrix of other sizes."""
    matrices = {name: p.shape[1] for name, p in model.named_parameters() if p.ndim > 1}
    yield from unused("fsdp.shard_columns", list(matrices), patterns, field="", what="matrix")
    for name, columns in matrices.items():
        if columns % ranks and first_match(name, patterns) is not None:
            yield (
                f"fsdp.shard_columns: {name} has {columns} columns, which fsdp.dp_shard = {ranks} does not divide; "
                f"fsdp.dp_shard = {math.gcd(columns, ranks)} works, or a pattern without {name}"
            )


def column_placement(
    model: nn.Module, patterns: Sequence[str], ranks: int
) -> Callable[[nn.Parameter], Shard | None] | None:
    """Return fully_shard's placement function, which splits matching matrices at dim 1. None: split all at dim 0.

    A stack of experts (E, M, N) with fewer experts than ranks is also split at dim 1, if `ranks` divides it. Otherwise
    some ranks would have no part of it.
    """
    by_columns = {
        id(p)
        for name, p in model.named_parameters()
        if (p.ndim > 1 and first_match(name, patterns) is not None)
        or (p.ndim == 3 and len(p) < ranks and p.shape[1] % ranks == 0)
    }
    return (lambda parameter: Shard(1) if id(parameter) in by_columns else None) if by_columns else None
