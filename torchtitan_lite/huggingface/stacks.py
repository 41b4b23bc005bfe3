"""Stacks and unstacks experts: Hugging Face stores one matrix per expert, we store one tensor (E, O, I) per layer.

    layers.0.feed_forward.w1.weight (E, O, I)  <->  layers.0.feed_forward.w1.{0, ..., E - 1}.weight (O, I)

`names.py` translates the names on the right. Both directions are lazy: one to three stacks are in memory at a time.
"""

import functools
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from torchtitan_lite.checkpointing.safetensors_file import LazyTensors, specs_of

_OF_ONE = re.compile(r"(.*\.feed_forward\.w[123])\.(\d+)(\.weight)")
_OF_ALL = re.compile(r"(.*\.feed_forward\.w[123])(\.weight)")


def stack_experts(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the weights with each layer's experts stacked. Whether all are there, the caller sees by their shapes."""
    known = dict(specs_of(weights))
    stacks: dict[str, dict[int, Tensor]] = {}
    for match in filter(None, map(_OF_ONE.fullmatch, weights)):
        dtype, shape = known.pop(match[0])
        experts = stacks.setdefault(match[1] + match[3], {})
        experts[int(match[2])] = weights[match[0]]
        known[match[1] + match[3]] = dtype, (len(experts), *shape)

    def make(name: str) -> Tensor:
        experts = stacks.get(name, {})
        return torch.stack([experts[i] for i in range(len(experts))]) if experts else weights[name]

    return LazyTensors(known, make)


def unstack_experts(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Invert `stack_experts`."""
    # experts are written one after another, each with its three matrices
    stack = functools.lru_cache(maxsize=3)(weights.__getitem__)
    known: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, (dtype, shape) in specs_of(weights).items():
        match = _OF_ALL.fullmatch(name) if len(shape) == 3 else None
        of_each = [f"{match[1]}.{i}{match[2]}" for i in range(shape[0])] if match else []
        known |= dict.fromkeys(of_each, (dtype, shape[1:])) if match else {name: (dtype, shape)}

    def make(name: str) -> Tensor:
        match = _OF_ONE.fullmatch(name)
        return stack(match[1] + match[3])[int(match[2])] if match else weights[name]

    return LazyTensors(known, make)
