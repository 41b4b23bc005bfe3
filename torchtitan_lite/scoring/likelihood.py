"""Log-likelihoods of token sequences, computed by all ranks.

Validation, tasks and `evaluate` cut their texts into rows of tokens. A batch of rows is one forward pass on one rank.
Rows are summed by item (a document, a choice), and one all-reduce gives every rank the sums of all items.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor, nn

from torchtitan_lite.data.loader import MicroBatch
from torchtitan_lite.distributed.process_group import Process, sum_over_ranks
from torchtitan_lite.models.loss import IGNORE

T = TypeVar("T")


@dataclass(frozen=True)
class Window:
    """Consecutive tokens; all but the first `known` are predicted. Stored compactly: a task may have millions."""

    item: int  # the index of the item to whose sum the window's value is added
    ids: NDArray[np.int32]
    known: int = 1  # at least 1

    def __len__(self) -> int:
        """Return the length of the window's row in a batch."""
        return len(self.ids) - 1


@dataclass(frozen=True)
class Batch:
    """The rows of one forward pass, and each row's item."""

    items: Tensor  # (B,) int64
    rows: MicroBatch


Measure = Callable[[nn.Module, Batch, torch.device], Tensor]  # returns K sums over each row's targets, (K, B)


def pad_batch(windows: list[Window]) -> Batch:
    """Make a batch of windows. Padding follows the tokens of a row, which do not attend to it."""
    length = max(map(len, windows))
    tokens = torch.zeros(len(windows), length, dtype=torch.int64)
    targets = torch.full((len(windows), length), IGNORE)
    for row, window in enumerate(windows):
        ids = torch.from_numpy(window.ids)
        tokens[row, : len(window)] = ids[:-1]
        targets[row, window.known - 1 : len(window)] = ids[window.known :]
    return Batch(torch.tensor([window.item for window in windows]), MicroBatch(tokens, targets))


def row_sizes(rows: MicroBatch, bytes_per_token: Tensor) -> Tensor:
    """Return each row's number of targets, and the bytes of their text, (2, B) int64.

    Args:
        bytes_per_token: (V,) int64.
    """
    known = rows.targets != IGNORE
    n_bytes = bytes_per_token[rows.targets.clamp(min=0)] * known
    return torch.stack((known.sum(1), n_bytes.sum(1)))


def nats_only(model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Return one value per row, the negative log-likelihood in nats (1, B). A Measure."""
    nats: Tensor = model(**batch.rows.on(device), per_sequence=True)
    return nats[None]


@torch.no_grad()
def sums_by_item(
    model: nn.Module,
    batches: Iterable[T],
    load: Callable[[T], Batch],
    items: Sized,
    process: Process,
    measure: Measure = nats_only,
    n_values: int = 1,
) -> Tensor:
    """Measure rows and sum the values by item, (n_values, items) float64 in host memory. Collective.

    One rank computes each batch, and the sum of a float64 with zeros is exact. So the same batches give the same bits
    on any number of ranks.

    Args:
        batches: of all ranks, in the same order on each.
        load: makes a batch; called for this rank's batches.
        items: its length is read last, because reading the batches may add items.
    """
    parts = []
    for which, counts in batches_of_rank(batches, process):
        batch = load(which)
        values = measure(model, batch, process.device)
        if counts:
            parts.append((batch.items, values.double()))
    sums = torch.zeros(n_values, len(items), dtype=torch.float64)
    for rows, values in parts:
        sums.index_add_(1, rows, values.cpu())
    # a world of one needs no process group: see api.py
    return sum_over_ranks(sums.to(process.device)).cpu() if process.world_size > 1 else sums


def batches_of_rank(batches: Iterable[T], process: Process) -> Iterator[tuple[T, bool]]:
    """Yield each of this rank's batches, and whether to use its result. Ranks take turns.

    Every rank gets the same number, because a sharded model's forward pass is collective. In the last round, ranks
    without a batch repeat the last one, and that result is dropped.
    """
    remaining = iter(batches)
    while batches_of_round := list(islice(remaining, process.world_size)):
        counts = process.rank < len(batches_of_round)
        yield batches_of_round[process.rank if counts else -1], counts


def bytes_per_token(tokenizer: Tokenizer, marks: Sequence[int] = ()) -> NDArray[np.int64]:
    """Return the bytes of each token's text, (size,) int64; 0 for special tokens and the marks between documents.

    Marks have no text, even if they are ordinary entries of the vocabulary. In a byte-level vocabulary each
    character of a token is one byte. In others, U+2581 is a space and <0xAB> is a byte.
    """
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
    byte_level = all(alphabet.issuperset(token) for token in vocabulary if token not in added)
    for token, index in vocabulary.items():
        if added.get(token, False):
            continue
        if token in added:
            lengths[index] = len(token.encode())
        elif byte_level or (len(token) == 6 and token.startswith("<0x")):
            lengths[index] = len(token) if byte_level else 1
        else:
            lengths[index] = len(token.replace("\u2581", " ").encode())
    lengths[list(marks)] = 0
    return lengths
