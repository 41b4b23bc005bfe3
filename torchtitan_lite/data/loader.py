"""Batches: which tokens each rank gets at a position of the run.

Dataset sample j is tokens[j T : j T + T + 1]: T inputs, and the same shifted by one as targets. The global batch at
position `samples_consumed` is the run's samples samples_consumed, ..., samples_consumed + G - 1 (see order.py). It is
laid out over micro-batches, then ranks, then rows; rows that are left over are fully masked, and count for nothing
because the loss is divided by the number of valid targets of the whole batch.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchtitan_lite.data.order import sample_index
from torchtitan_lite.data.prepare import read_meta, token_dtype
from torchtitan_lite.errors import DataError
from torchtitan_lite.loss import IGNORE


@dataclass(frozen=True)
class MicroBatch:
    """What one forward takes; on the CPU, in pinned memory if a GPU will fetch it."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64; IGNORE where there is nothing to learn


@dataclass(frozen=True)
class Batch:
    """A rank's share of a global batch."""

    micro_batches: list[MicroBatch]
    global_tokens: int  # valid targets of all ranks and micro-batches


class Samples:
    """The sequences of one split of a prepared folder, memory-mapped."""

    def __init__(self, folder: Path, split: str, seq_len: int) -> None:
        """
        Raises:
            DataError: the split is shorter than one sequence.
        """
        meta = read_meta(folder)
        self.tokens = np.memmap(folder / f"{split}.bin", dtype=token_dtype(meta.vocab_size), mode="r")
        self.seq_len = seq_len
        self.n_samples = (len(self.tokens) - 1) // seq_len
        if self.n_samples < 1:
            raise DataError(
                f"the {split} text has {len(self.tokens):,} tokens, less than one sequence of train.seq_len + 1 = "
                f"{seq_len + 1}; use more text or train.seq_len = {max(len(self.tokens) - 1, 1)}"
            )

    def __getitem__(self, index: int) -> Tensor:
        """Sequence `index`, (T + 1,) int64."""
        start = index * self.seq_len
        return torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))


@dataclass(frozen=True)
class Loader:
    """Cuts global batches into the micro-batches of this rank."""

    samples: Samples
    micro_batch_size: int
    rank: int
    world_size: int
    seed: int | None  # None: in the order of the file
    pin: bool = False  # a copy to the GPU from pageable memory would make the host wait for the stream

    def batch(self, first: int, size: int) -> Batch:
        """This rank's share of the global batch of run samples first, ..., first + size - 1."""
        per_round = self.micro_batch_size * self.world_size
        rounds = -(-size // per_round)
        micro_batches = [
            self._micro_batch(
                [first + row if row < size else None for row in range(start, start + self.micro_batch_size)]
            )
            for start in (turn * per_round + self.rank * self.micro_batch_size for turn in range(rounds))
        ]
        return Batch(micro_batches, global_tokens=size * self.samples.seq_len)

    def _micro_batch(self, run_samples: list[int | None]) -> MicroBatch:
        rows = torch.zeros(len(run_samples), self.samples.seq_len + 1, dtype=torch.int64)
        targets = torch.full((len(run_samples), self.samples.seq_len), IGNORE)
        for row, i in enumerate(run_samples):
            if i is not None:
                rows[row] = self.samples[self._index(i)]
                targets[row] = rows[row, 1:]
        tokens = rows[:, :-1].contiguous()
        return MicroBatch(tokens.pin_memory(), targets.pin_memory()) if self.pin else MicroBatch(tokens, targets)

    def _index(self, i: int) -> int:
        return i if self.seed is None else sample_index(i, self.samples.n_samples, self.seed)
