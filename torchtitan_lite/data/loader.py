"""Batches: the tokens of each rank at a position of the run.

The global batch of size G at position `samples_consumed` is samples samples_consumed, ..., samples_consumed + G - 1 of
the run (order.py). They are laid out over micro-batches, then ranks, then rows. Surplus rows are fully masked: they do
not change the loss, which is divided by the number of valid targets of the global batch.
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
    """The inputs of one forward, (B, T) int64 each, in host memory; pinned for a GPU."""

    tokens: Tensor
    targets: Tensor  # IGNORE where masked
    positions: Tensor | None = None  # within the document, with document_mask

    def on(self, device: torch.device) -> tuple[Tensor | None, ...]:
        """The model's arguments, on its device."""
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
    """A Loader or a PrefetchingLoader."""

    def batch(self, first: int, size: int) -> Batch: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Loader:
    """Cuts global batches into the micro-batches of this rank."""

    samples: SampleSource
    micro_batch_size: int
    rank: int
    world_size: int
    seed: int | None  # None: file order
    document_mask: bool = False
    pin: bool = False  # a copy from pageable memory would block the host on the GPU's stream

    def batch(self, first: int, size: int) -> Batch:
        """This rank's share of the global batch of samples first, ..., first + size - 1."""
        per_round = self.micro_batch_size * self.world_size
        rounds = -(-size // per_round)
        starts = np.arange(rounds) * per_round + self.rank * self.micro_batch_size
        mine = (starts[:, None] + np.arange(self.micro_batch_size)).ravel()
        rows = self.samples.draw(first + mine[mine < size], self.seed)
        parts = [rows.tokens, rows.targets, *([positions(rows)] if self.document_mask else [])]
        if len(rows.tokens) < len(mine):  # the surplus rows are this rank's last ones
            surplus = Rows.empty(len(mine) - len(rows.tokens), rows.tokens.shape[1], rows.targets.shape[1])
            fill = [surplus.tokens, surplus.targets, *([positions(surplus)] if self.document_mask else [])]
            parts = [np.concatenate(both) for both in zip(parts, fill, strict=True)]
        tensors = [torch.from_numpy(part) for part in parts]
        if self.pin:
            tensors = [tensor.pin_memory() for tensor in tensors]
        micro_batches = [
            MicroBatch(*some) for some in zip(*(t.split(self.micro_batch_size) for t in tensors), strict=True)
        ]
        return Batch(micro_batches, global_tokens=self.samples.n_targets(np.arange(first, first + size), self.seed))

    def close(self) -> None:
        """Do nothing: there is no thread."""


def positions(rows: Rows) -> Array:
    """Each token's position (N, T) in its document; a document that began earlier counts from the sequence's start."""
    places = np.broadcast_to(np.arange(rows.tokens.shape[1]), rows.tokens.shape)
    return places - np.maximum.accumulate(np.where(rows.begins, places, 0), axis=1)


class PrefetchingLoader:
    """Loads the next batch in a thread. It expects consecutive batches; any other batch is loaded on request."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader = loader
        # a new thread's current GPU is 0: without this, all ranks would register pinned memory there
        initializer = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        self._thread = ThreadPoolExecutor(1, "batches", *initializer)
        self._next: tuple[tuple[int, int], Future[Batch]] | None = None

    def batch(self, first: int, size: int) -> Batch:
        """See Loader. An error in the thread is raised by the call that requests its batch."""
        expected, self._next = self._next, None
        if expected is None or expected[0] != (first, size):
            expected = (first, size), self._submit(first, size)
        batch = expected[1].result()
        self._next = (first + size, size), self._submit(first + size, size)
        return batch

    def _submit(self, first: int, size: int) -> Future[Batch]:
        return self._thread.submit(self._loader.batch, first, size)

    def close(self) -> None:
        """End the thread after its current batch."""
        self._thread.shutdown(cancel_futures=True)
