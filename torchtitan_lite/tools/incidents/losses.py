"""The mean loss of each part of a document, in the sample that held it, under a checkpoint."""

import math

import numpy as np
import torch
from torch import Tensor

from torchtitan_lite.data.loader import MicroBatch
from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE
from torchtitan_lite.scoring.likelihood import row_nats
from torchtitan_lite.tools.incidents.seen import Part, Range, Seen

_ROWS = 8  # computed together


@torch.no_grad()
def losses_of(model: Transformer, seen: Seen, sample: int, device: torch.device) -> list[float]:
    """The mean loss of each of `Seen.parts` of a sample; NaN where nothing of it is predicted.

    In a causal sample each part has its own loss, in the context that it had in training. A sample of span corruption
    or pairs has one loss, which all of its parts share.
    """
    row, documents, ranges = seen.draw(sample)
    parts = [part for read in ranges for part in documents.parts(read)]
    targets = torch.cat([_targets_of(part, row, ranges) for part in parts]) if seen.causal else row.targets
    nats = []
    for some in targets.split(_ROWS):
        tokens, positions = (None if t is None else t.expand(len(some), -1) for t in (row.tokens, row.positions))
        assert tokens is not None
        nats += row_nats(model, MicroBatch(tokens, some, positions), device).tolist()
    counts = (targets != IGNORE).sum(dim=1).tolist()
    found = [total / n if n else math.nan for total, n in zip(nats, counts, strict=True)]
    return found if seen.causal else found * len(parts)


def _targets_of(part: Part, row: MicroBatch, ranges: list[Range]) -> Tensor:
    """The targets of a causal row, (1, T), with those that are not of this part masked."""
    keep, column = np.zeros(row.targets.shape[1], np.bool_), 0
    for first, end in ranges:  # a read of n tokens gives n - 1 inputs and their targets
        low, high = max(part.begin, first + 1), min(part.stop, end)
        if first <= part.begin < end and low < high:
            keep[column + low - first - 1 : column + high - first - 1] = True
        column += end - first - 1
    return torch.where(torch.from_numpy(keep), row.targets, IGNORE)
