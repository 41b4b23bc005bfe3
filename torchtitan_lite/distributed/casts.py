"""Casts between groups that compute in different dtypes.

`cast_forward_inputs` would also cast the rotary tables, which have to stay float32.
"""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def cast_inputs(dtypes: Iterable[tuple[nn.Module, torch.dtype]]) -> None:
    """Have each module cast its first argument, the activations."""
    for module, dtype in dtypes:
        module.register_forward_pre_hook(functools.partial(_cast_first, dtype))


def _cast_first(dtype: torch.dtype, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    first, *others = args
    return (first.to(dtype) if first.is_floating_point() else first, *others)
