"""Sources of sequences, mixed by weight.

A mixture repeats a table of P entries. With weights 0.7 and 0.3 it has ten: seven of one source and three of the other,
spread evenly, so each source's share is exact to within one sample at any time. Sample i is entry i % P. Each source
has its own epochs and its own order.

If a run changes its mixture, each segment of its samples has a table of its own, and every source continues where it
was (segments.py).

The table is an earliest-deadline-first schedule: the j-th sample of a source with share w is released at (j - 1) / w
and due at j / w. If shares sum to 1, no deadline is missed (Baruah et al., 1996; Tijdeman, 1980).
"""

import bisect
import math
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Rows, Samples
from torchtitan_lite.errors import ConfigError

LONGEST = 1 << 16


class Mixture:
    """Sequences of one or more folders, in the periodic order of the table."""

    def __init__(self, sources: list[Samples], weights: list[float], names: list[str]) -> None:
        """
        Args:
            weights: any positive numbers, normalized to shares. If the shares' period exceeds 65,536 samples, the
                table is cut there, and the shares are exact to within 1 in 65,536.

        Raises:
            ConfigError: a source has less than one sample in 65,536.
        """
        self.sources, self.names = sources, names
        self.begin(0, dict.fromkeys(names, 0))
        shares = exact_shares(weights)
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

    def begin(self, first: int, starts: Mapping[str, int]) -> None:
        """Begin the table at a sample of the run, before which each source has given this many of its samples.

        Args:
            starts: by a key for each source, in their order.
        """
        self.first, self.starts = first, starts

    def locate(self, run_samples: Indices) -> tuple[Indices, Indices]:
        """Return for each sample of the run its source, and its 0-based position among that source's samples."""
        periods, entries = np.divmod(run_samples - self.first, len(self.table))
        sources = self.table[entries]
        starts = np.array([*self.starts.values()], dtype=np.int64)
        return sources, starts[sources] + periods * self.counts[sources] + self._before[entries, sources]

    def positions(self, run_sample: int) -> dict[str, int]:
        """Return how many of its samples each source has given before this sample of the run, by key."""
        periods, entry = divmod(run_sample - self.first, len(self.table))
        given = (periods * self.counts + self._before[entry]).tolist()
        return {key: start + n for (key, start), n in zip(self.starts.items(), given, strict=True)}

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        """Return these samples of a run, numbered across epochs; without a seed, each source in file order."""
        first, (which, numbers) = self.sources[0], self.locate(run_samples)
        if len(self.sources) == 1:
            return first.trimmed(first.draw(numbers, seed))
        rows = Rows.empty(len(run_samples), first.seq_len, first.target_len)
        for k, source in enumerate(self.sources):
            here = which == k
            if here.any():
                part = source.draw(numbers[here], seed)
                rows.tokens[here], rows.targets[here], rows.begins[here] = part.tokens, part.targets, part.begins
        return first.trimmed(rows)

    def n_targets(self, run_samples: Indices, seed: int | None) -> dict[str, int]:
        """Return the number of valid targets of each source in these samples, by key."""
        which, numbers = self.locate(run_samples)
        sources = enumerate(zip(self.starts, self.sources, strict=True))
        return {key: source.n_targets(numbers[which == k], seed) for k, (key, source) in sources}

    @property
    def n_samples(self) -> int:
        """Sequences of all sources."""
        return sum(source.n_samples for source in self.sources)

    def longest_prefix(self, n: int) -> int:
        """Return the largest number of samples, at most n, without a repeated sequence."""

        def repeats(m: int) -> bool:
            return any(c > s.n_samples for c, s in zip(self.positions(m).values(), self.sources, strict=True))

        return bisect.bisect_left(range(1, n + 1), True, key=repeats)


def exact_shares(weights: list[float]) -> list[Fraction]:
    """Return the weights as exact shares of 1: 0.7 is seven tenths, not the nearest binary fraction."""
    exact = [Fraction(repr(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def _schedule(shares: list[Fraction], length: int) -> list[int]:
    sources, scheduled = list[int](), [0] * len(shares)
    released = [0] * len(shares)  # each source's next sample: the first entry that it may have
    due = [math.ceil(1 / share) for share in shares]
    for entry in range(length):
        k = min((k for k, first in enumerate(released) if first <= entry), key=due.__getitem__)
        sources.append(k)
        scheduled[k] += 1
        released[k], due[k] = math.floor(scheduled[k] / shares[k]), math.ceil((scheduled[k] + 1) / shares[k])
    return sources
