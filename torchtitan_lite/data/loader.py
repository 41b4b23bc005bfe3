"""Batches: which tokens each rank gets at a position of the run.

The global batch at position `samples_consumed` is the run's samples samples_consumed, ..., samples_consumed + G - 1
(see order.py and order.py). It is laid out over micro-batches, then ranks, then rows; rows that are left over are
fully masked, and count for nothing because the loss is divided by the number of valid targets of the whole batch.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchtitan_lite.data.samples import Array, Rows, SampleSource


@dataclass(frozen=True)
class MicroBatch:
    """What one forward takes; on the CPU, in pinned memory if a GPU will fetch it. (B, T) int64 each."""

    tokens: Tensor
    targets: Tensor  # IGNORE where there is nothing to learn
    positions: Tensor | None = None  # within the document, if attention is confined to it

    def on(self, device: torch.device) -> tuple[Tensor | None, ...]:
        """What the model takes, on its device."""
        tokens, targets = (part.to(device, non_blocking=True) for part in (self.tokens, self.targets))
        if self.positions is None:
            return tokens, targets
        return tokens, targets, None, self.positions.to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """A rank's share of a global batch."""

    micro_batches: list[MicroBatch]
    global_tokens: int  # valid targets of all ranks and micro-batches


class Batches(Protocol):
    """What the loop wants: a Loader, or one that works ahead."""

    def batch(self, first: int, size: int) -> Batch: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Loader:
    """Cuts global batches into the micro-batches of this rank."""

    samples: SampleSource
    micro_batch_size: int
    rank: int
    world_size: int
    seed: int | None  # None: in the order of the file
    document_mask: bool = False
    pin: bool = False  # a copy to the GPU from pageable memory would make the host wait for the stream

    def batch(self, first: int, size: int) -> Batch:
        """This rank's share of the global batch of run samples first, ..., first + size - 1."""
        per_round = self.micro_batch_size * self.world_size
        rounds = -(-size // per_round)
        starts = np.arange(rounds) * per_round + self.rank * self.micro_batch_size
        mine = (starts[:, None] + np.arange(self.micro_batch_size)).ravel()
        drawn = self.samples.draw(first + mine[mine < size], self.seed)
        parts = [drawn.tokens, drawn.targets, *([positions(drawn)] if self.document_mask else [])]
        if len(drawn.tokens) < len(mine):  # the rows that are left over are the last of mine
            missing = Rows.empty(len(mine) - len(drawn.tokens), self.samples.seq_len)
            fill = [missing.tokens, missing.targets, *([positions(missing)] if self.document_mask else [])]
            parts = [np.concatenate(both) for both in zip(parts, fill, strict=True)]
        tensors = [torch.from_numpy(part) for part in parts]
        if self.pin:
            tensors = [tensor.pin_memory() for tensor in tensors]
        micro_batches = [
            MicroBatch(*some) for some in zip(*(t.split(self.micro_batch_size) for t in tensors), strict=True)
        ]
        return Batch(micro_batches, global_tokens=self.samples.n_targets(np.arange(first, first + size), self.seed))

    def close(self) -> None:
        """Nothing runs beside it."""


def positions(rows: Rows) -> Array:
    """The place of each token in its document, or, for a document that began earlier, in the sequence; (N, T)."""
    places = np.broadcast_to(np.arange(rows.tokens.shape[1]), rows.tokens.shape)
    return places - np.maximum.accumulate(np.where(rows.begins, places, 0), axis=1)


class PrefetchingLoader:
    """A loader whose next batch is made by a thread while the model computes.

    Which batch that is follows from the one before. Whoever asks for another one gets it all the same, later.
    """

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader = loader
        # a thread's current GPU is the first one: pinned memory of all ranks would be registered there
        chosen = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        self._thread = ThreadPoolExecutor(1, "batches", *chosen)
        self._next: tuple[tuple[int, int], Future[Batch]] | None = None

    def batch(self, first: int, size: int) -> Batch:
        """See Loader. An error of the thread is raised here, by the call that asks for its batch."""
        expected, self._next = self._next, None
        if expected is None or expected[0] != (first, size):
            expected = (first, size), self._submit(first, size)
        batch = expected[1].result()
        self._next = (first + size, size), self._submit(first + size, size)
        return batch

    def _submit(self, first: int, size: int) -> Future[Batch]:
        return self._thread.submit(self._loader.batch, first, size)

    def close(self) -> None:
        """End the thread, after the batch that it is making."""
        self._thread.shutdown(cancel_futures=True)
