"""Which sample comes when: a permutation that needs no memory to speak of.

Sample i of a run is dataset sample `sample_index(i, n, seed)`: epoch i // n, position i % n, and one permutation of
0..n-1 per (seed, epoch). The permutation is a Feistel network on the smallest even number of bits that holds n, and
values that fall outside 0..n-1 are encrypted again until they fall inside ("cycle walking", Black and Rogaway, 2002:
fewer than four rounds of it on average, because the network's domain is at most four times n).

So the position in the data is one integer, any position is found in constant time, and neither the world size nor the
batch sizes nor the number of steps can change what comes when.

The round function sees half of the bits only, so its values are kept as they are needed: at most 8 sqrt(n) of them.
That makes a whole batch a few numpy operations.
"""

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_ROUNDS = 4


def sample_index(i: int, n: int, seed: int) -> int:
    """The dataset sample (0 <= result < n) that is sample `i` (0-based, over all epochs) of a run with this seed."""
    return int(sample_indices(np.array([i]), n, seed)[0])


def sample_indices(run_samples: Indices, n: int, seed: int) -> Indices:
    """`sample_index` of each element."""
    epochs, positions = np.divmod(run_samples, n)
    found = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        found[here] = _permutation(n, f"{seed}/{epoch}".encode())(positions[here])
    return found


def permute(position: int, n: int, key: bytes) -> int:
    """The image of `position` under the permutation of 0..n-1 that `key` (at most 64 bytes) stands for."""
    return int(_permutation(n, key)(np.array([position]))[0])


class Permutation:
    """One permutation of 0..n-1."""

    def __init__(self, n: int, key: bytes) -> None:
        self._n, self._key = n, key
        self._half = max((n - 1).bit_length() + 1, 2) // 2
        self._rounds = np.full((_ROUNDS, 1 << self._half), -1, dtype=np.int64)  # -1: not needed so far

    def __call__(self, positions: Indices) -> Indices:
        """The images of positions, all in 0..n-1."""
        images = np.empty_like(positions)
        where, values = np.arange(len(positions)), positions
        while len(where):
            values = self._encrypted(values)
            inside = values < self._n
            images[where[inside]] = values[inside]
            where, values = where[~inside], values[~inside]
        return images

    def _encrypted(self, values: Indices) -> Indices:
        left, right = values >> self._half, values & ((1 << self._half) - 1)
        for turn in range(_ROUNDS):
            left, right = right, left ^ self._round(turn, right)
        return left << self._half | right

    def _round(self, turn: int, values: Indices) -> Indices:
        known = self._rounds[turn]
        for value in np.unique(values[known[values] < 0]).tolist():
            known[value] = _hash(value, turn, self._key) & ((1 << self._half) - 1)
        return known[values]


_permutation = functools.lru_cache(maxsize=64)(Permutation)  # an epoch or two of each source


def _hash(value: int, turn: int, key: bytes) -> int:
    data = value.to_bytes(8, "little") + bytes((turn,))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")
