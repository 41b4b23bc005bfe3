"""Which sample comes when: a permutation that needs no memory to speak of, and a table that mixes sources.

Sample i of a run is dataset sample `sample_index(i, n, seed)`: epoch i // n, position i % n, and one permutation of
0..n-1 per (seed, epoch). The permutation is a Feistel network on the smallest even number of bits that holds n, and
values that fall outside 0..n-1 are encrypted again until they fall inside ("cycle walking", Black and Rogaway, 2002:
fewer than four rounds of it on average, because the network's domain is at most four times n).

So the position in the data is one integer, any position is found in constant time, and neither the world size nor the
batch sizes nor the number of steps can change what comes when.

The round function sees half of the bits only, so its values are kept as they are needed: at most 8 sqrt(n) of them.
That makes a whole batch a few numpy operations.

A mixture (`Interleave`) uses one short table that repeats. With weights 0.7 and 0.3 the table has ten entries, seven of
one source and three of the other, spread evenly: after any number of samples each source has had its share, to within
one sample. Sample i of the run is entry i % P of the table; how often its source came before that is a product and a
look-up. So a mixture keeps no state either, and each source goes through its own epochs in its own order.

The table is made as real-time schedulers do it: the j-th sample of a source with share w may come no earlier than at
(j - 1) / w and no later than at j / w, and of those that may come, the one goes first that is due first. With shares
that sum to 1 nothing is ever late (Baruah et al., 1996; Tijdeman's chairman assignment, 1980).
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


LONGEST = 1 << 16


class Interleave:
    """The periodic order of K sources."""

    def __init__(self, weights: list[float]) -> None:
        """
        Args:
            weights: any positive numbers; their ratios count. Where the shares have no common period of at most 65,536
                samples, the table holds the first 65,536 of them, and the shares are kept to within 1 in 65,536.

        Raises:
            ConfigError: a source has less than one sample in 65,536.
        """
        shares = shares_of(weights)
        period = math.lcm(*(share.denominator for share in shares))
        self.table = np.array(_schedule(shares, min(period, LONGEST)), dtype=np.int64)  # (P,) the source of each entry
        once = self.table[:, None] == np.arange(len(weights))
        self.counts = once.sum(axis=0)  # (K,) entries of each source
        if not self.counts.all():
            poor = int(np.flatnonzero(self.counts == 0)[0])
            raise ConfigError(
                f"data.sources: a weight of {weights[poor]} of {sum(weights)} is less than one sample in {LONGEST:,}; "
                f"{sum(weights) / 1e4:g} works"
            )
        self._before = np.cumsum(once, axis=0) - once  # (P, K)

    def locate(self, run_samples: Indices) -> tuple[Indices, Indices]:
        """For each sample of the run its source, and its number (0-based) among the samples of that source."""
        periods, entries = np.divmod(run_samples, len(self.table))
        sources = self.table[entries]
        return sources, periods * self.counts[sources] + self._before[entries, sources]

    def consumed(self, n: int) -> list[int]:
        """How many of the run's first n samples came from each source."""
        periods, entry = divmod(n, len(self.table))
        return [periods * int(count) + int(b) for count, b in zip(self.counts, self._before[entry], strict=True)]


def shares_of(weights: list[float]) -> list[Fraction]:
    """Weights as exact shares of 1: 0.7 is seven tenths, not the binary fraction next to it."""
    exact = [Fraction(repr(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def _schedule(shares: list[Fraction], length: int) -> list[int]:
    sources = []
    waiting = [(0, k) for k in range(len(shares))]  # (when its next sample may come, source)
    ready: list[tuple[int, int]] = []  # (when its next sample is due, source)
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
