"""The order of samples: a stateless permutation per epoch.

Sample i of a run is dataset sample `sample_indices([i], n, seed)`: position i % n in a permutation of 0..n-1 for epoch
i // n. The permutation is a Feistel network on the smallest even number of bits that can hold n - 1 (at least 2).
Values outside 0..n-1 are encrypted again until they fall inside ("cycle walking", Black and Rogaway, 2002). Each of the
four round functions sees half of the bits, so tables of at most 8 sqrt(n) values in all cache them.

So the state is one integer, and the order does not depend on world size, batch sizes or steps.
"""

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_ROUNDS = 4


def sample_indices(run_samples: Indices, n: int, seed: int) -> Indices:
    """Map a run's sample numbers (N,), counted from 0 across epochs, to dataset samples in 0..n-1."""
    epochs, positions = np.divmod(run_samples, n)
    indices = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        selected = epochs == epoch
        indices[selected] = _permutation(n, f"{seed}/{epoch}".encode())(positions[selected])
    return indices


class Permutation:
    """A keyed permutation of 0..n-1."""

    def __init__(self, n: int, key: bytes) -> None:
        self._n, self._key = n, key
        self._half = max((n - 1).bit_length() + 1, 2) // 2
        self._rounds = np.full((_ROUNDS, 1 << self._half), -1, dtype=np.int64)  # -1: not computed yet

    def __call__(self, positions: Indices) -> Indices:
        """Permute positions, which must be in 0..n-1."""
        permuted = np.empty_like(positions)
        where, values = np.arange(len(positions)), positions
        while len(where):
            values = self._encrypted(values)
            inside = values < self._n
            permuted[where[inside]] = values[inside]
            where, values = where[~inside], values[~inside]
        return permuted

    def _encrypted(self, values: Indices) -> Indices:
        left, right = values >> self._half, values & ((1 << self._half) - 1)
        for round_index in range(_ROUNDS):
            left, right = right, left ^ self._round(round_index, right)
        return left << self._half | right

    def _round(self, round_index: int, values: Indices) -> Indices:
        cached = self._rounds[round_index]
        for value in np.unique(values[cached[values] < 0]).tolist():
            cached[value] = _hash(value, round_index, self._key) & ((1 << self._half) - 1)
        return cached[values]


_permutation = functools.lru_cache(maxsize=64)(Permutation)  # each source uses one or two epochs at a time


def _hash(value: int, round_index: int, key: bytes) -> int:
    data = value.to_bytes(8, "little") + bytes((round_index,))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")
