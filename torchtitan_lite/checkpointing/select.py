"""Selects the checkpoint to resume from, and applies retention. Ranks verify together and get the same result.

`select_checkpoint` changes nothing on disk. It plans which checkpoints to set aside; `set_aside` renames them once
the run is sure to start, so a process that dies in between changes nothing. Errors are raised on every rank.
"""

import contextlib
import math
import re
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.progress import on_rank0
from torchtitan_lite.checkpointing.storage import Manifest
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import CheckpointError, UnreadableError

T = TypeVar("T")


@dataclass
class Selection:
    """A verified checkpoint, or none, and notes about the others."""

    folder: Path | None = None
    manifest: Manifest | None = None
    notes: list[str] = field(default_factory=list)
    aside: list[tuple[int, str]] = field(default_factory=list)  # steps to set aside, as "old" or "bad"


def select_checkpoint(checkpoints: Path, config: CheckpointConfig, world: World) -> Selection:
    """The checkpoint that `config.resume` asks for; with "auto" the newest complete one.

    Damaged checkpoints are set aside as .bad-step-N if an older one is complete. With "step-N", later ones are set
    aside as .old-step-N, or the next resume would take them.

    Raises:
        CheckpointError: the requested checkpoint is missing or damaged, all are damaged, or an I/O error.
    """
    wanted = config.resume
    selection = Selection(notes=on_rank0(world, lambda: storage.incomplete_folders(checkpoints)))
    if wanted == "never":
        selection.aside = [(step, "old") for step in on_rank0(world, lambda: storage.find_steps(checkpoints))]
        return selection
    steps = on_rank0(world, lambda: storage.find_steps(checkpoints))
    if re.fullmatch(r"step-\d+", wanted):
        step = int(wanted.removeprefix("step-"))
        if step not in steps:
            found = ", ".join(f"step-{s}" for s in steps) or "no checkpoints"
            raise CheckpointError(f'checkpoint.resume = "step-{step}" does not exist in {checkpoints}; found {found}')
        selection.folder = storage.step_folder(checkpoints, step)
        selection.manifest = _require_complete(selection.folder, config, world)
        selection.aside = [(s, "old") for s in steps if s > step]
        return selection
    damaged: list[tuple[int, str]] = []
    for step in reversed(steps):
        folder = storage.step_folder(checkpoints, step)
        manifest, problems = _verified(folder, config, world)
        if not problems:
            selection.folder, selection.manifest = folder, manifest
            break
        damaged.append((step, "; ".join(problems)))
    if damaged and selection.folder is None:
        raise CheckpointError(
            "\n  ".join(["no checkpoint is complete:", *(text for _, text in damaged)])
            + "\n  --checkpoint.resume=never starts from the beginning, and keeps these as .old-step-N"
        )
    selection.notes += [f"damaged: {text}" for _, text in damaged]
    selection.aside = [(step, "bad") for step, _ in damaged]
    if selection.folder is None and wanted != "auto":
        from torchtitan_lite.checkpointing.verify import newest_of

        selection.folder = on_rank0(world, lambda: newest_of(Path(wanted).expanduser()))
        selection.manifest = _require_complete(selection.folder, config, world)
    return selection


def _verified(folder: Path, config: CheckpointConfig, world: World) -> tuple[Manifest | None, list[str]]:
    from torchtitan_lite.checkpointing.verify import verify_together

    return verify_together(folder, config.verify, world)


def _require_complete(folder: Path, config: CheckpointConfig, world: World) -> Manifest | None:
    manifest, problems = _verified(folder, config, world)
    if problems:
        raise CheckpointError("; ".join(problems))
    return manifest


def set_aside(checkpoints: Path, planned: list[tuple[int, str]]) -> list[str]:
    """Rename the planned checkpoints, on one rank. Returns lines for the log.

    Raises:
        CheckpointError: one can't be renamed; the others are renamed back.
    """
    moved: list[tuple[Path, Path]] = []
    for step, why in sorted(planned):  # the newest last: if this is killed, a resume selects the same one
        folder = storage.step_folder(checkpoints, step)
        try:
            if aside := storage.set_aside(folder, why):
                moved.append((folder, aside))
        except (OSError, CheckpointError) as error:
            for before, after in reversed(moved):
                with contextlib.suppress(OSError):
                    after.rename(before)
            raise CheckpointError(f"{folder} can't be set aside: {error}") from None
    return [f"{before} was set aside as {after}" for before, after in moved]


def purge(checkpoints: Path, keep: Iterable[int]) -> list[int]:
    """Delete all checkpoints but these. Returns the deleted steps.

    Raises:
        OSError, UnreadableError: a checkpoint can't be read or renamed; the next save tries again.
    """
    kept = set(keep)
    gone = []
    for step in storage.find_steps(checkpoints):
        if step in kept:
            continue
        folder = storage.step_folder(checkpoints, step)
        trash = folder.with_name(f".trash-{folder.name}-{uuid.uuid4().hex[:8]}")
        folder.rename(trash)  # so that no half-deleted checkpoint is found
        shutil.rmtree(trash, ignore_errors=True)
        gone.append(step)
    return gone


def to_keep(checkpoints: Path, latest: int, every: int, best: bool, also: Iterable[int]) -> set[int]:
    """The steps that retention keeps.

    Args:
        latest: this many of the newest; 0: all.
        every: multiples of this; 0: off.
        best: the one with the lowest finite validation loss.
        also: these steps.
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
