"""train.py, which writes each batch of a rank to $BATCHES/RANK-FIRST.npz: an entry of `ranks`."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import train
from torchtitan_lite.data.loader import Batch, Loader

_honest = Loader.batch


def _recorded(self: Loader, first: int, size: int) -> Batch:
    batch = _honest(self, first, size)
    if self.seed == 0 and self.world_size > 1:
        tokens, targets = (
            np.concatenate([part.numpy() for part in both])
            for both in zip(*((m.tokens, m.targets) for m in batch.micro_batches), strict=True)
        )
        np.savez(Path(os.environ["BATCHES"]) / f"{os.environ['RANK']}-{first}", tokens=tokens, targets=targets)
    return batch


def main(argv: Sequence[str]) -> int:
    setattr(Loader, "batch", _recorded)  # noqa: B010
    return train.main(argv)
