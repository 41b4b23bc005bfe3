"""Which checkpoints stay, and how the others go."""

import math
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.errors import CheckpointError, UnreadableError


def purge(checkpoints: Path, keep: Iterable[int]) -> list[int]:
    """Delete all checkpoints but these, and return the steps of those.

    Raises:
        OSError, UnreadableError: some can't be looked at, or renamed; the rest is left for the next time.
    """
    kept = set(keep)
    gone = []
    for step in storage.find_steps(checkpoints):
        if step in kept:
            continue
        folder = storage.step_folder(checkpoints, step)
        trash = folder.with_name(f".trash-{folder.name}-{uuid.uuid4().hex[:8]}")
        folder.rename(trash)  # so that a half-deleted one is never taken for a checkpoint
        shutil.rmtree(trash, ignore_errors=True)
        gone.append(step)
    return gone


def to_keep(checkpoints: Path, latest: int, every: int, best: bool, also: Iterable[int]) -> set[int]:
    """The steps that retention keeps.

    Args:
        latest: this many of the newest; 0: all.
        every: multiples of this; 0: none for this reason.
        best: the one with the lowest validation loss that is finite.
        also: whatever must stay.
    """
    steps = storage.find_steps(checkpoints)
    if latest == 0:
        return set(steps)
    keep = {*steps[-latest:], *also}
    keep |= {step for step in steps if every and step % every == 0}
    if best:
        scores: dict[int, float] = {}
        for step in steps:
            try:
                loss = storage.read_state(storage.step_folder(checkpoints, step)).val_loss
            except UnreadableError:
                keep.add(step)  # it may be the best
                continue
            except CheckpointError:
                continue
            if loss is not None and math.isfinite(loss):
                scores[step] = loss
        keep |= {min(scores, key=lambda step: (scores[step], step))} if scores else set()
    return keep
