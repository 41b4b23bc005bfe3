"""Sequences of T tokens and their targets, from one prepared folder. mixture.py mixes several.

Sequence j of a folder is tokens[j T : j T + T + 1] of its stream: T inputs, and the targets shifted by one. Documents
follow each other, separated by the end token; a sequence may begin or end within one. For packed documents, pairs and
span corruption see open_samples.py.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.data.order import Indices, sample_indices
from torchtitan_lite.data.token_files import TokenFiles, read_meta
from torchtitan_lite.errors import DataError
from torchtitan_lite.models.loss import IGNORE

Array = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """N sequences."""

    tokens: Array  # (N, T)
    targets: Array  # (N, S), IGNORE where masked; S is T except for encoder-decoders
    begins: NDArray[np.bool_]  # (N, T) True at the token before each document

    @classmethod
    def empty(cls, n: int, seq_len: int, target_len: int | None = None) -> "Rows":
        """Return fully masked sequences."""
        targets = np.full((n, seq_len if target_len is None else target_len), IGNORE, np.int64)
        return cls(np.zeros((n, seq_len), np.int64), targets, np.zeros((n, seq_len), np.bool_))

    def followed_by(self, other: "Rows") -> "Rows":
        """Return these sequences followed by others of the same lengths."""
        return Rows(
            np.concatenate((self.tokens, other.tokens)),
            np.concatenate((self.targets, other.targets)),
            np.concatenate((self.begins, other.begins)),
        )


class Samples:
    """The sequences of one split of a prepared folder."""

    n_samples: int  # in an epoch
    mean_tokens: float  # mean number of valid targets per sequence
    notes: tuple[str, ...] = ()  # logged at the start

    def __init__(
        self, folder: Path, split: str, seq_len: int, target_len: int | None = None, raw: int | None = None
    ) -> None:
        """
        Args:
            raw: tokens that a sequence takes from the stream; default: seq_len.

        Raises:
            DataError: the split is shorter than one sequence, or the folder is damaged.
        """
        meta, raw = read_meta(folder), raw or seq_len
        self.seq_len, self.target_len = seq_len, target_len or seq_len
        self._stream, self._end, self._first = TokenFiles(folder, meta, split), meta.end_token, meta.marks[-1]
        n_tokens = meta.tokens(split)
        self.n_samples, self.mean_tokens = (n_tokens - 1) // raw, float(self.target_len)
        if self.n_samples < 1:
            raise DataError(
                f"the {split} text of {folder} has {n_tokens:,} tokens, and one sequence of train.seq_len = {seq_len} "
                f"takes {raw + 1}; use more text or a smaller train.seq_len"
            )

    def indices(self, run_samples: Indices, seed: int | None) -> Indices:
        """Return the sequence index of each sample of a run."""
        if seed is None:
            return run_samples
        return sample_indices(run_samples, self.n_samples, seed)

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        rows = Rows.empty(len(run_samples), self.seq_len)
        for row, index in enumerate(self.indices(run_samples, seed).tolist()):
            first = index * self.seq_len
            tokens = self._stream.read(first, first + self.seq_len + 1)
            rows.tokens[row], rows.targets[row] = tokens[:-1], tokens[1:]
        np.equal(rows.tokens, self._first, out=rows.begins)
        return rows

    def n_targets(self, run_samples: Indices, seed: int | None) -> int:
        return len(run_samples) * self.target_len

    def trimmed(self, rows: Rows) -> Rows:
        """Return the rows without columns that are padding in all of them, if lengths vary."""
        return rows
