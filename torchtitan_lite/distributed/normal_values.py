"""Normal initial values that do not depend on the sharding: element i of a parameter is a function of (seed, name, i).

    bits  = splitmix64's output number i for the key SHA-256(seed, name)      (Steele, Lea and Flood, 2014)
    value = std * quantile[bits >> 48]                                        65,536 equally likely normal quantiles

The largest value is 4.17 std.
"""

import functools
import hashlib
import math
from statistics import NormalDist

import torch
from torch import Tensor

from torchtitan_lite.distributed.sharding import own_part, shard_dim
from torchtitan_lite.models.induction import Entries

_GAMMA = 0x9E3779B97F4A7C15
_MIX = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
_LEVELS = 1 << 16
_CHUNK = 1 << 20  # elements drawn at a time, to bound memory


def normal_(seed: int, name: str, parameter: Tensor, std: float, added: Entries | None = None) -> None:
    """Fill this rank's rows of a parameter with N(0, std^2); then add `added`.

    Args:
        added: rows, columns and values of matrix elements.
    """
    shard, first_row = own_part(parameter)
    flat, dim = shard.view(-1), shard_dim(parameter)
    first = first_row * math.prod(parameter.shape[dim + 1 :])
    # with shards at dim 1, this rank has only a part of each row
    own, others = math.prod(shard.shape[dim:]), math.prod(parameter.shape[dim:]) - math.prod(shard.shape[dim:])
    table = _quantiles().to(flat.device) * std
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    for start in range(0, flat.numel(), _CHUNK):
        stop = min(start + _CHUNK, flat.numel())
        index = torch.arange(first + start, first + stop, dtype=torch.int64, device=flat.device)
        if dim:
            index += (index - first) // own * others
        flat[start:stop] = table[splitmix64(int.from_bytes(key[:8], "little"), index) >> 48 & (_LEVELS - 1)]
    if added is not None:
        *places, values = added
        places[dim] = places[dim] - first_row
        here = (places[dim] >= 0) & (places[dim] < shard.shape[dim])
        at = [place[here].to(flat.device) for place in places]
        shard[at[0], at[1]] += values[here].to(shard)


def splitmix64(key: int, index: Tensor) -> Tensor:
    """Return outputs number `index` (0-based) of splitmix64 with this key, 64 bits each as int64."""
    bits = index * _signed(_GAMMA) + _signed(key + _GAMMA)
    for shift, factor in _MIX:
        bits = (bits ^ _shift_right(bits, shift)) * _signed(factor)
    return bits ^ _shift_right(bits, 31)


def _signed(value: int) -> int:
    """Return the int64 with the same low 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Shift without the sign bit, which `>>` of an int64 would repeat."""
    return bits >> by & ((1 << (64 - by)) - 1)


@functools.cache
def _quantiles() -> Tensor:
    """Return (65536,) float32 normal quantiles at the middles of equal probability steps, scaled to a std of 1."""
    normal = NormalDist()
    values = [normal.inv_cdf((level + 0.5) / _LEVELS) for level in range(_LEVELS)]
    std = math.sqrt(sum(value * value for value in values) / _LEVELS)
    return torch.tensor([value / std for value in values], dtype=torch.float32)
