"""Which checkpoint a run goes on from: rank 0 looks, all ranks verify together, and all get the same answer.

`choose` moves nothing: it plans what to set aside. `set_aside` carries that out, when everything else about the command
has been accepted. A process that dies in between has changed nothing, and the same command plans the same again.
"""

import contextlib
import math
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from torchtitan_lite.checkpointing import progress, storage
from torchtitan_lite.checkpointing.storage import Manifest
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed.agreement import outcome_on_rank0
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import CheckpointError, UnreadableError, UserError

T = TypeVar("T")


@dataclass
class Choice:
    """A checkpoint that passed its verification, or none; and what there is to say about the others."""

    folder: Path | None = None
    manifest: Manifest | None = None
    notes: list[str] = field(default_factory=list)
    aside: list[tuple[int, str]] = field(default_factory=list)  # steps to set aside, and as what: "old" or "bad"


def choose(checkpoints: Path, config: CheckpointConfig, world: World) -> Choice:
    """The checkpoint that `config.resume` asks for; with "auto" the newest that is whole.

    Damaged ones are named, and are to be set aside as .bad-step-N, if there is an older one to go on from. Later ones
    than the step that was asked for are to be set aside as .old-step-N: the next resume would otherwise take them.

    Raises:
        CheckpointError: on every rank: what was asked for is not there or damaged, or all there are are damaged, or one
            can't be read at the moment.
    """
    wanted = config.resume
    choice = Choice(notes=on_rank0(world, lambda: storage.incomplete_folders(checkpoints)))
    if wanted == "never":
        choice.aside = [(step, "old") for step in on_rank0(world, lambda: storage.find_steps(checkpoints))]
        return choice
    if re.fullmatch(r"step-\d+", wanted):
        return _exactly(checkpoints, int(wanted.removeprefix("step-")), config, world, choice)
    candidates = on_rank0(world, lambda: storage.find_steps(checkpoints))[::-1]
    damaged: list[tuple[int, str]] = []
    for step in candidates:
        folder = storage.step_folder(checkpoints, step)
        manifest, problems = verify_together(folder, config.verify, world)
        if manifest is not None and not problems:
            choice.folder, choice.manifest = folder, manifest
            break
        damaged.append((step, "; ".join(problems)))
    if damaged and choice.folder is None:
        raise CheckpointError(
            "\n  ".join(["no checkpoint is whole:", *(text for _, text in damaged)])
            + "\n  --checkpoint.resume=never starts from the beginning, and keeps these as .old-step-N"
        )
    if damaged:
        choice.notes += [f"damaged: {text}" for _, text in damaged]
        choice.aside = [(step, "bad") for step, _ in damaged]
    if choice.folder is None and wanted != "auto":
        return _elsewhere(Path(wanted).expanduser(), config, world, choice)
    return choice


def _exactly(checkpoints: Path, step: int, config: CheckpointConfig, world: World, choice: Choice) -> Choice:
    steps = on_rank0(world, lambda: storage.find_steps(checkpoints))
    if step not in steps:
        there = ", ".join(f"step-{s}" for s in steps) or "none"
        raise CheckpointError(
            f'checkpoint.resume = "step-{step}": there is no such checkpoint in {checkpoints}; there are {there}'
        )
    choice.folder = storage.step_folder(checkpoints, step)
    choice.manifest, problems = verify_together(choice.folder, config.verify, world)
    if problems or choice.manifest is None:
        raise CheckpointError("; ".join(problems))
    choice.aside = [(s, "old") for s in steps if s > step]
    return choice


def _elsewhere(folder: Path, config: CheckpointConfig, world: World, choice: Choice) -> Choice:
    """A checkpoint of another run, or the newest of a run, to go on from in this run's folder."""

    def find() -> Path:
        found = storage.checkpoints_of(folder)
        if not found:
            raise CheckpointError(f'checkpoint.resume = "{folder}" is no checkpoint, and no run with one')
        return found[-1]

    choice.folder = on_rank0(world, find)
    choice.manifest, problems = verify_together(choice.folder, config.verify, world)
    if problems or choice.manifest is None:
        raise CheckpointError("; ".join(problems))
    return choice


def set_aside(checkpoints: Path, planned: list[tuple[int, str]]) -> list[str]:
    """Rename what was planned, on one rank. Returns what to log.

    Raises:
        CheckpointError: one can't be renamed; the others have their names back.
    """
    moved: list[tuple[Path, Path]] = []
    for step, why in sorted(planned):  # the newest last: until then a resume takes what it would have taken
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


def verify_together(folder: Path, mode: str, world: World) -> tuple[Manifest | None, list[str]]:
    """The manifest, and everything that is wrong; the ranks share the hashing.

    Files of a full state dict may lie on a disk of the first machine: its ranks hash them.

    Raises:
        CheckpointError: on every rank, if one can't read a file at the moment.
    """
    manifest, error = on_rank0(world, lambda: _manifest(folder))
    if manifest is None:
        return None, [error]
    n = world.world_size if manifest.state_dict == "sharded" else min(world.local_world_size, world.world_size)
    by_size = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
    mine = by_size[world.rank :: n] if world.rank < n else []
    problems: list[str] = []
    unreadable = ""
    try:
        with progress.working(f"verifying its share of {folder.name}"):
            problems = [
                wrong for name in mine if (wrong := storage.verify_file(folder, name, manifest.files[name], mode))
            ]
    except UnreadableError as caught:
        unreadable = str(caught)
    found: list[tuple[list[str], str]] = [([], "")] * world.world_size
    dist.all_gather_object(found, (problems, unreadable), group=world.untimed)
    if errors := list(dict.fromkeys(text for _, text in found if text)):
        raise CheckpointError("\n  ".join(errors))
    return manifest, [wrong for some, _ in found for wrong in some]


def _manifest(folder: Path) -> tuple[Manifest | None, str]:
    try:
        manifest = storage.read_manifest(folder)
        wrong = storage.misnamed(folder, manifest.step)
        return (None, wrong) if wrong else (manifest, "")
    except UnreadableError:
        raise
    except CheckpointError as error:
        return None, str(error)


def on_rank0(world: World, action: Callable[[], T]) -> T:
    """Do it on rank 0, and let every rank have the result.

    Raises:
        CheckpointError: on every rank, if rank 0 had an error that a person can act on.
    """
    reading = progress.within("reading the checkpoint for all ranks", action)
    result, error = outcome_on_rank0(world.rank, reading, world.untimed, (UserError, OSError))
    if error:
        raise CheckpointError(error)
    return cast(T, result)


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
