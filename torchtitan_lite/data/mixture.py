"""Which source comes when: one short table that repeats.

With weights 0.7 and 0.3 the table has ten entries, seven of the one and three of the other, spread evenly: after any
number of samples each source has had its share, to within one sample. Sample i of the run is entry i % P of the table;
how often its source came before that is a product and a look-up. So a mixture keeps no state either, and each source
goes through its own epochs in its own order.

The table is made as real-time schedulers do it: the j-th sample of a source with share w may come no earlier than at
(j - 1) / w and no later than at j / w, and of those that may come, the one goes first that is due first. With shares
that sum to 1 nothing is ever late (Baruah et al., 1996; Tijdeman's chairman assignment, 1980).
"""

import heapq
import math
from fractions import Fraction

import numpy as np

from torchtitan_lite.data.order import Indices
from torchtitan_lite.errors import ConfigError

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
