"""The order of samples: a stateless permutation per epoch, and a periodic table that mixes sources.

Sample i of a run is dataset sample `sample_index(i, n, seed)`: position i % n in a permutation of 0..n-1 for epoch
i // n. The permutation is a Feistel network on the smallest even number of bits that holds n. Values outside 0..n-1
are encrypted again until they fall inside ("cycle walking", Black and Rogaway, 2002; fewer than four passes on
average, because the domain is at most 4 n). A round function sees half of the bits, so a table of at most 8 sqrt(n)
values caches it, and a batch takes a few numpy operations.

The state is therefore one integer, and the order depends neither on the world size nor on batch sizes or steps.

A mixture (`Interleave`) repeats a table of P entries. With weights 0.7 and 0.3 it has ten: seven of one source and
three of the other, spread evenly, so each source's share is exact to within one sample at any time. Sample i is entry
i % P. Each source has its own epochs and its own order.

The table is an earliest-deadline-first schedule: the j-th sample of a source with share w is released at (j - 1) / w
and due at j / w. If shares sum to 1, no deadline is missed (Baruah et al., 1996; Tijdeman, 1980).
"""

import functools
import hashlib
import heapq
import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.errors import ConfigError

Indices = NDArray[np.int64]

_ROUNDS = 4


def sample_index(i: int, n: int, seed: int) -> int:
    """The dataset sample (0 <= result < n) at position `i` (0-based, over all epochs) of a run with this seed."""
    return int(sample_indices(np.array([i]), n, seed)[0])


def sample_indices(run_samples: Indices, n: int, seed: int) -> Indices:
    """`sample_index` of each element."""
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
        cached = self._rounds[turn]
        for value in np.unique(values[cached[values] < 0]).tolist():
            cached[value] = _hash(value, turn, self._key) & ((1 << self._half) - 1)
        return cached[values]


_permutation = functools.lru_cache(maxsize=64)(Permutation)  # one or two epochs of each source


def _hash(value: int, turn: int, key: bytes) -> int:
    data = value.to_bytes(8, "little") + bytes((turn,))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")


LONGEST = 1 << 16


class Interleave:
    """The periodic order of K sources."""

    def __init__(self, weights: list[float]) -> None:
        """
        Args:
            weights: any positive numbers, normalized to shares. If the shares' period exceeds 65,536 samples, the
                table is cut there, and the shares are exact to within 1 in 65,536.

        Raises:
            ConfigError: a source has less than one sample in 65,536.
        """
        shares = shares_of(weights)
        period = math.lcm(*(share.denominator for share in shares))
        self.table = np.array(_schedule(shares, min(period, LONGEST)), dtype=np.int64)  # (P,) the source of each entry
        one_hot = self.table[:, None] == np.arange(len(weights))
        self.counts = one_hot.sum(axis=0)  # (K,) entries of each source
        if not self.counts.all():
            poor = int(np.flatnonzero(self.counts == 0)[0])
            raise ConfigError(
                f"data.sources: a weight of {weights[poor]} of {sum(weights)} is less than one sample in {LONGEST:,}; "
                f"{sum(weights) / 1e4:g} works"
            )
        self._before = np.cumsum(one_hot, axis=0) - one_hot  # (P, K) entries of each source before this one

    def locate(self, run_samples: Indices) -> tuple[Indices, Indices]:
        """For each sample of the run: its source, and its 0-based position among the samples of that source."""
        periods, entries = np.divmod(run_samples, len(self.table))
        sources = self.table[entries]
        return sources, periods * self.counts[sources] + self._before[entries, sources]

    def consumed(self, n: int) -> list[int]:
        """How many of the run's first n samples come from each source."""
        periods, entry = divmod(n, len(self.table))
        return [periods * int(count) + int(b) for count, b in zip(self.counts, self._before[entry], strict=True)]


def shares_of(weights: list[float]) -> list[Fraction]:
    """Weights as exact shares of 1: 0.7 is seven tenths, not the binary fraction next to it."""
    exact = [Fraction(repr(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def _schedule(shares: list[Fraction], length: int) -> list[int]:
    sources = []
    waiting = [(0, k) for k in range(len(shares))]  # (release time of its next sample, source)
    ready: list[tuple[int, int]] = []  # (deadline of its next sample, source)
    had = [0] * len(shares)
    for entry in range(length):
        while waiting and waiting[0][0] <= entry:
            _, k = heapq.heappop(waiting)
            heapq.heappush(ready, (math.ceil((had[k] + 1) / shares[k]), k))
        _, k = heapq.heappop(ready)
        sources.append(k)
        had[k] += 1
        heapq.heappush(waiting, (math.floor(had[k] / shares[k]), k))
    return sources
