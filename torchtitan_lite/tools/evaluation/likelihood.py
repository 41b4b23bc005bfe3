"""The log-likelihood of documents, computed on all ranks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchtitan_lite.data.samples import Mixture
from torchtitan_lite.distributed.process_group import World, sum_over_ranks
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring.likelihood import Window, losses
from torchtitan_lite.tools.evaluation.documents import Document, hash_of

_SORTED = 1024  # windows that are sorted by length, so that a batch has little padding


@dataclass(frozen=True)
class Scores:
    """By document: summed negative log-likelihood in nats, scored tokens, bytes, and a hash of the text."""

    nats: NDArray[np.float64]
    tokens: NDArray[np.float64]
    n_bytes: NDArray[np.float64]
    hashes: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    seq_len: int = field(default=0, kw_only=True)  # tokens in a window

    def __len__(self) -> int:
        return len(self.nats)

    def __add__(self, other: "Scores") -> "Scores":
        parts = zip(self._arrays(), other._arrays(), strict=True)
        return Scores(*(np.concatenate(pair) for pair in parts), seq_len=self.seq_len)

    def first(self, n: int | None) -> "Scores":
        """The scores of the first n documents; None: of all."""
        return Scores(*(part[:n] for part in self._arrays()), seq_len=self.seq_len)

    def of_the_same(self, other: "Scores") -> bool:
        """Whether both are of the same documents."""
        return len(self) == len(other) and np.array_equal(self.hashes, other.hashes)

    def _arrays(self) -> tuple[NDArray[np.float64], ...]:
        return self.nats, self.tokens, self.n_bytes, self.hashes


def windows(documents: Iterable[Document], prefix: list[int], length: int) -> Iterator[tuple[Document, list[Window]]]:
    """Each document, cut into windows of at most `length` tokens. Every token is predicted once: from all tokens of its
    window before it, and the first of a window from the last of the window before.

    Args:
        prefix: what precedes a document. Without it, a document's first token has no prediction.
    """
    for i, document in enumerate(documents):
        stream = prefix + document.tokens
        inputs, targets = stream[:-1], stream[1:]
        starts = range(0, len(targets), length)
        yield document, [Window(i, inputs[s : s + length], targets[s : s + length]) for s in starts]


@torch.no_grad()
def score(
    model: Transformer, documents: Iterable[Document], prefix: list[int], length: int, world: World, batch_size: int
) -> Scores:
    """Score documents. Collective: the ranks share the batches, and all get the same result.

    Args:
        length: of a window, in tokens; at most the model's max_seq_len.
    """
    found: list[tuple[int, int, int]] = []  # tokens, bytes and hash of each document
    nats: list[Tensor] = []
    indices: list[int] = []
    cut = windows(documents, prefix, length)
    batches = 0
    pending: list[Window] = []
    while True:
        some = list(islice(cut, 64))
        for document, parts in some:
            found.append((sum(len(part.targets) for part in parts), document.n_bytes, document.hash))
            pending += parts
        if len(pending) < _SORTED and some:
            continue
        pending.sort(key=lambda window: -len(window.tokens))
        for start in range(0, len(pending), batch_size):
            batch = pending[start : start + batch_size]
            if batches % world.world_size == world.rank:
                nats.append(losses(model, batch, world.device))
                indices += [window.document for window in batch]
            batches += 1
        pending = []
        if not some:
            break
    total = torch.zeros(len(found), dtype=torch.float64)
    if indices:
        total.index_add_(0, torch.tensor(indices), torch.cat(nats).double().cpu())
    total = summed(total, world)
    return Scores(total.numpy(), *np.array(found, dtype=np.float64).reshape(-1, 3).T, seq_len=length)


@torch.no_grad()
def score_rows(
    model: Transformer, samples: Mixture, lengths: NDArray[np.int64], world: World, batch_size: int
) -> Scores:
    """Score the targets of all rows: pairs, or spans that an encoder-decoder has to fill in. Collective, see `score`.

    Args:
        lengths: bytes of text of each token.
    """
    found = torch.zeros(4, samples.n_samples, dtype=torch.float64)
    for i, first in enumerate(range(0, samples.n_samples, batch_size)):
        if i % world.world_size != world.rank:
            continue
        which = np.arange(first, min(first + batch_size, samples.n_samples))
        rows = samples.draw(which, None)
        tokens, targets = (torch.from_numpy(part) for part in (rows.tokens, rows.targets))
        known = rows.targets != IGNORE
        found[0, which] = row_losses(model, tokens, targets, None, world.device).double().cpu()
        found[1, which] = torch.from_numpy(known.sum(1)).double()
        found[2, which] = torch.from_numpy((lengths[np.where(known, rows.targets, 0)] * known).sum(1)).double()
        hashes = [hash_of(row[row != IGNORE].tobytes()) for row in rows.targets]
        found[3, which] = torch.tensor(hashes, dtype=torch.float64)
    return Scores(*summed(found, world).numpy(), seq_len=samples.seq_len)


def summed(values: Tensor, world: World) -> Tensor:
    """The sum over ranks. A world of one needs no process group: see api.py."""
    return sum_over_ranks(values.to(world.device)).cpu() if world.world_size > 1 else values


def row_losses(
    model: Transformer, tokens: Tensor, targets: Tensor, positions: Tensor | None, device: torch.device
) -> Tensor:
    """The summed loss of each row, (B,) float32. `positions` confines attention to documents."""
    places = None if positions is None else positions.to(device)
    return model(tokens.to(device), targets.to(device), None, places, per_sequence=True)
