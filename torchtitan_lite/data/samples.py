"""Sequences of T tokens and their targets, from one prepared folder or a mixture. `[data] packing` decides how:

concat      sequence j is tokens[j T : j T + T + 1] of the stream: T inputs, and the targets shifted by one
best_fit    whole documents, each preceded by the previous end token, from which its first token is predicted

Objectives other than "causal" have subclasses: see objectives.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.data.order import Indices, Interleave, sample_indices
from torchtitan_lite.data.token_files import TokenFiles, read_meta
from torchtitan_lite.errors import DataError
from torchtitan_lite.models.loss import IGNORE

Array = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """N sequences."""

    tokens: Array  # (N, T)
    targets: Array  # (N, S), IGNORE where masked; S is T except for encoder-decoders
    begins: NDArray[np.bool_]  # (N, T) True at the end token before each document

    @classmethod
    def empty(cls, n: int, seq_len: int, target_len: int | None = None) -> "Rows":
        """Fully masked sequences."""
        targets = np.full((n, seq_len if target_len is None else target_len), IGNORE, np.int64)
        return cls(np.zeros((n, seq_len), np.int64), targets, np.zeros((n, seq_len), np.bool_))


class SampleSource(Protocol):
    """A loader's source of sequences. Run samples are numbered over all epochs."""

    seq_len: int

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        """These samples of a run; without a seed, in file order."""
        ...

    def n_targets(self, run_samples: Indices, seed: int | None) -> int:
        """The number of their valid targets."""
        ...


class Samples:
    """The sequences of one split of a prepared folder."""

    notes: tuple[str, ...] = ()  # logged at the start

    def __init__(self, folder: Path, split: str, seq_len: int, packing: str = "concat") -> None:
        """
        Raises:
            DataError: the split is shorter than one sequence, or the folder is damaged.
        """
        meta = read_meta(folder)
        self.seq_len = self.target_len = seq_len
        self._stream = TokenFiles(folder, meta, split)
        self._end = meta.end_token
        self._pieces: Array | None = None
        n_tokens = meta.tokens(split)
        if packing == "best_fit":
            from torchtitan_lite.data.packing import fill, pack

            self._fill = fill
            self._index = index = pack(folder, meta, seq_len, lambda _: None)
            self._n_tokens = n_tokens
            self._pieces = np.memmap(index / f"{split}.pieces", dtype=np.int64, mode="r").reshape(-1, 2)
            self._rows: Array = np.memmap(index / f"{split}.rows", dtype=np.int64, mode="r").reshape(-1, 2)
            self.n_samples = len(self._rows) - 1
            self.mean_tokens = (n_tokens - 1) / self.n_samples
            return
        self.mean_tokens = float(seq_len)
        self.n_samples = (n_tokens - 1) // seq_len
        if self.n_samples < 1:
            raise DataError(
                f"the {split} text of {folder} has {n_tokens:,} tokens, less than one sequence of train.seq_len + 1 = "
                f"{seq_len + 1}; use more text or train.seq_len = {max(n_tokens - 1, 1)}"
            )

    def indices(self, run_samples: Indices, seed: int | None) -> Indices:
        """The sequence index of each sample of a run."""
        return run_samples if seed is None else sample_indices(run_samples, self.n_samples, seed)

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        indices = self.indices(run_samples, seed).tolist()
        rows = Rows.empty(len(indices), self.seq_len)
        for row, index in enumerate(indices):
            if self._pieces is None:
                stream = self._stream.read(index * self.seq_len, (index + 1) * self.seq_len + 1)
                rows.tokens[row], rows.targets[row] = stream[:-1], stream[1:]
            else:
                pieces = self._pieces[self._rows[index, 0] : self._rows[index + 1, 0]]
                self._fill(
                    rows, row, pieces, self._stream, self._n_tokens, f"{self._index} is damaged: sequence {index:,}"
                )
        if self._pieces is None:
            np.equal(rows.tokens, self._end, out=rows.begins)
        return rows

    def n_targets(self, run_samples: Indices, seed: int | None) -> int:
        if self._pieces is None:
            return len(run_samples) * self.seq_len
        indices = self.indices(run_samples, seed)
        return int((self._rows[indices + 1, 1] - self._rows[indices, 1]).sum())

    def trimmed(self, rows: Rows) -> Rows:
        """The rows without columns that are padding in all of them, where lengths vary."""
        return rows


class Mixture:
    """Sequences of several folders, interleaved by a periodic table (order.py)."""

    def __init__(self, sources: list[Samples], weights: list[float], names: list[str]) -> None:
        self.names = names
        self.seq_len, self.target_len = sources[0].seq_len, sources[0].target_len
        self.sources = sources
        self.interleave = Interleave(weights)

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        rows = Rows.empty(len(run_samples), self.seq_len, self.target_len)
        which, numbers = self.interleave.locate(run_samples)
        for k, source in enumerate(self.sources):
            at = which == k
            if at.any():
                part = source.draw(numbers[at], seed)
                rows.tokens[at], rows.targets[at], rows.begins[at] = part.tokens, part.targets, part.begins
        return self.sources[0].trimmed(rows)

    def n_targets(self, run_samples: Indices, seed: int | None) -> int:
        which, numbers = self.interleave.locate(run_samples)
        return sum(source.n_targets(numbers[which == k], seed) for k, source in enumerate(self.sources))

    @property
    def n_samples(self) -> int:
        """Sequences of all sources."""
        return sum(source.n_samples for source in self.sources)

    def consumed(self, n: int) -> list[int]:
        """How many of a run's first n samples come from each source."""
        return self.interleave.consumed(n)

    def longest_prefix(self, n: int) -> int:
        """The largest number of samples, at most n, without a repeated sequence."""
        low, high = 0, n
        while low < high:
            middle = (low + high + 1) // 2
            fits = all(c <= s.n_samples for c, s in zip(self.consumed(middle), self.sources, strict=True))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low
