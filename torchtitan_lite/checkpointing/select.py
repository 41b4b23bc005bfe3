"""Which checkpoint a run resumes from, and which ones retention keeps. Ranks verify together and get the same result.

Errors are raised on every rank.
"""

import contextlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpointing import progress, storage
from torchtitan_lite.checkpointing.progress import on_rank0
from torchtitan_lite.checkpointing.safetensors_file import FileRecord
from torchtitan_lite.checkpointing.storage import Manifest
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed.agreement import from_all_ranks
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import CheckpointError, UnreadableError


@dataclass
class Selection:
    """A verified checkpoint and its manifest, None if there is none; and the steps of newer ones that are damaged."""

    checkpoint: tuple[Path, Manifest] | None = None
    notes: list[str] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)


def select_checkpoint(checkpoints: Path, config: CheckpointConfig, world: World) -> Selection:
    """The newest complete checkpoint of the run; if it has none, that of the run or folder that `config.resume` names.

    Raises:
        CheckpointError: all are damaged, `config.resume` has no complete one, or an I/O error.
    """
    selection = Selection(notes=on_rank0(world, lambda: storage.incomplete_folders(checkpoints)))
    steps = on_rank0(world, lambda: storage.find_steps(checkpoints))
    for step in reversed(steps):
        folder = storage.step_folder(checkpoints, step)
        manifest, problems = verify_together(folder, config.verify, world)
        if manifest is not None and not problems:
            selection.checkpoint = folder, manifest
            return selection
        selection.damaged.append(step)
        selection.notes.append(f"damaged: {'; '.join(problems)}")
    if selection.notes:
        raise CheckpointError(
            "\n  ".join(["no checkpoint is complete:", *selection.notes])
            + "\n  start another run with --run.name=NEW, from the beginning or from a checkpoint of another run"
        )
    if config.resume:
        other = Path(config.resume).expanduser()
        for name in on_rank0(world, lambda: _newest_first(other)):
            manifest, problems = verify_together(Path(name), config.verify, world)
            if manifest is not None and not problems:
                selection.checkpoint = Path(name), manifest
                return selection
            selection.notes.append(f"damaged: {'; '.join(problems)}")
        raise CheckpointError("\n  ".join([f"no checkpoint in {other} is complete:", *selection.notes]))
    return selection


def saved_config(run: Path, resume: str) -> Mapping[str, Any]:
    """The config of the checkpoint that this process expects to resume from, without verifying it; {} if there is none.

    Args:
        run: the run's folder.
        resume: `checkpoint.resume`.

    Raises:
        FormatError: another version of torchtitan_lite wrote it.
    """
    with contextlib.suppress(CheckpointError, OSError, RuntimeError, ValueError):
        found = storage.checkpoints_of(run / "checkpoints")
        if not found and resume:
            found = storage.checkpoints_of(Path(resume).expanduser())
        for folder in reversed(found):
            with contextlib.suppress(CheckpointError):  # damaged
                return storage.read_state(folder, named_by_step=False).config
    return {}


def _newest_first(folder: Path) -> list[str]:
    """The checkpoints of another run, or the checkpoint that the folder is."""
    if checkpoints := storage.checkpoints_of(folder):
        return [str(checkpoint) for checkpoint in reversed(checkpoints)]
    raise CheckpointError(f'checkpoint.resume = "{folder}" is not a checkpoint, or a run with one')


def verify_together(folder: Path, mode: str, world: World) -> tuple[Manifest | None, list[str]]:
    """The manifest, and all problems. The ranks share the hashing.

    A full state dict may be on a local disk of the first machine, so only that machine's ranks hash it.
    """

    def read_manifest() -> tuple[dict[str, Any] | None, str, int]:
        manifest, problem = storage.check_manifest(folder)
        # rank 0's number of local ranks for all: another machine may have more or fewer
        return asdict(manifest) if manifest else None, problem, world.local_world_size

    content, problem, n_hashing = on_rank0(world, read_manifest)
    if content is None:
        return None, [problem]
    files = {name: FileRecord(**record) for name, record in content["files"].items()}
    manifest = Manifest(**content | {"files": files})
    n_hashing = world.world_size if manifest.state_dict == "sharded" else min(n_hashing, world.world_size)
    by_size = sorted(files, key=lambda name: -files[name].bytes)
    mine = by_size[world.rank :: n_hashing] if world.rank < n_hashing else []
    problems: list[str] = []
    unreadable = ""
    try:
        with progress.working(f"verifying its share of {folder.name}"):
            checked = (storage.verify_file(folder, name, files[name], mode) for name in mine)
            problems = [problem for problem in checked if problem]
    except UnreadableError as error:
        unreadable = str(error)
    of_ranks = from_all_ranks((problems, unreadable), world.untimed)
    if errors := list(dict.fromkeys(error for _, error in of_ranks if error)):
        raise UnreadableError("\n  ".join(errors))
    return manifest, [problem for problems, _ in of_ranks for problem in problems]


# --- retention --------------------------------------------------------------------------------------------------


def to_keep(steps: Sequence[int], latest: int, every: int, also: Iterable[int]) -> set[int]:
    """The steps that retention keeps.

    Args:
        steps: of the checkpoints, ascending.
        latest: this many of the newest; 0: all.
        every: multiples of this; 0: off.
        also: these steps.
    """
    if latest == 0:
        return set(steps)
    return {*steps[-latest:], *also, *(step for step in steps if every and step % every == 0)}


def purge(checkpoints: Path, keep: Iterable[int]) -> list[int]:
    """Delete all checkpoints but these. Returns the deleted steps.

    Raises:
        OSError, UnreadableError: a checkpoint can't be read or renamed; the next save tries again.
    """
    kept = set(keep)
    deleted = []
    for step in storage.find_steps(checkpoints):
        if step in kept:
            continue
        shutil.rmtree(storage.discarded(storage.step_folder(checkpoints, step)), ignore_errors=True)
        deleted.append(step)
    return deleted
