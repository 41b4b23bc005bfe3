"""Batches: the tokens of each rank at a position of the run.

The global batch of size G is samples samples_consumed, ..., samples_consumed + G - 1 of the run (order.py; mixture.py
assigns each to a source), laid out over micro-batches, then ranks, then rows. With G = 10, two ranks and a
micro_batch_size of 2:

                     rank 0    rank 1
    micro-batch 0    0 1       2 3
    micro-batch 1    4 5       6 7
    micro-batch 2    8 9       - -

Every rank gets the same number of micro-batches, because each forward is collective. Surplus rows (-) are fully masked.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import torch
from torch import Tensor

from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.data.samples import Array, Rows


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward, int64 in host memory; pinned for a GPU."""

    tokens: Tensor  # (B, T)
    targets: Tensor  # (B, S), IGNORE where masked; S is T except for encoder-decoders
    sources: Tensor | None = None  # (B,) the number of each sequence's source in the mixture
    positions: Tensor | None = None  # (B, T) within the document, with document_mask

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """Return the model's arguments by name, on its device."""
        given = {"tokens": self.tokens, "targets": self.targets, "positions": self.positions}
        return {name: part.to(device, non_blocking=True) for name, part in given.items() if part is not None}


@dataclass(frozen=True)
class Batch:
    """This rank's share of a global batch."""

    micro_batches: list[MicroBatch]
    global_tokens: int  # valid targets in all ranks' micro-batches
    source_tokens: Mapping[str, int] = field(default_factory=dict)  # by key of a source, see Mixture.n_targets


@dataclass(frozen=True)
class Loader:
    """Cuts global batches into this rank's micro-batches."""

    samples: Mixture
    _: KW_ONLY
    micro_batch_size: int
    rank: int
    world_size: int
    seed: int | None  # None: file order
    document_mask: bool = False
    pin: bool = False  # a copy from pageable memory would block the host on the GPU's stream

    def batch(self, first: int, size: int) -> Batch:
        """Return this rank's share of the global batch of samples first, ..., first + size - 1."""
        per_round = self.micro_batch_size * self.world_size  # sequences of all ranks in one forward
        n_rounds = -(-size // per_round)
        starts = np.arange(n_rounds) * per_round + self.rank * self.micro_batch_size
        places = (starts[:, None] + np.arange(self.micro_batch_size)).ravel()  # this rank's rows in the batch
        rows = self.samples.draw(first + places[places < size], self.seed)
        n_surplus = len(places) - len(rows.tokens)
        if n_surplus:  # at the end of this rank's rows
            rows = rows.followed_by(Rows.empty(n_surplus, rows.tokens.shape[1], rows.targets.shape[1]))
        sources, _ = self.samples.locate(first + places)
        arrays = [rows.tokens, rows.targets, sources, *([positions(rows)] if self.document_mask else [])]
        tensors = [torch.from_numpy(array) for array in arrays]
        if self.pin:
            tensors = [tensor.pin_memory() for tensor in tensors]
        splits = (tensor.split(self.micro_batch_size) for tensor in tensors)
        micro_batches = [MicroBatch(*split) for split in zip(*splits, strict=True)]
        # every rank counts the targets of ALL ranks itself, so the loss can be scaled before any communication
        source_tokens = self.samples.n_targets(np.arange(first, first + size), self.seed)
        return Batch(micro_batches, sum(source_tokens.values()), source_tokens)


def positions(rows: Rows) -> Array:
    """Return each token's position (N, T) in its document, or in the sequence if the document began earlier."""
    places = np.broadcast_to(np.arange(rows.tokens.shape[1]), rows.tokens.shape)
    return places - np.maximum.accumulate(np.where(rows.begins, places, 0), axis=1)


class PrefetchingLoader:
    """Loads the next batch in a thread. Expects consecutive batches; any other batch is loaded on request."""

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader = loader
        # a new thread's current GPU is 0: without this, all ranks would register pinned memory there
        initializer = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        self._thread = ThreadPoolExecutor(1, "batches", *initializer)
        self._ahead: dict[tuple[int, int], Future[Batch]] = {}  # the next batch, by first and size

    def batch(self, first: int, size: int, end: int | None = None) -> Batch:
        """Return a batch as Loader does. Raises the thread's error when that batch is requested.

        Args:
            end: the sample after the last batch, which may be smaller.
        """
        future = self._ahead.pop((first, size), None) or self._submit(first, size)
        self._ahead.clear()
        batch = future.result()
        following = first + size, size if end is None else min(size, end - first - size)
        if following[1] > 0:
            self._ahead[following] = self._submit(*following)
        return batch

    def _submit(self, first: int, size: int) -> Future[Batch]:
        return self._thread.submit(self._loader.batch, first, size)

    def close(self) -> None:
        """End the thread after its current batch."""
        self._thread.shutdown(cancel_futures=True)
