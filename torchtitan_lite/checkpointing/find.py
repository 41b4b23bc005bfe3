"""Finds the checkpoint that a path or a resuming run means: the newest complete one."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lite import progress
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.safetensors_file import FileRecord
from torchtitan_lite.checkpointing.shards import Reads, read_places
from torchtitan_lite.checkpointing.tensor_names import Tensors
from torchtitan_lite.config.paths import expand, not_downloaded
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed.exchange import on_all, on_rank0
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.environment import local_rank
from torchtitan_lite.errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # loaded only if the config asks for it
    from torchtitan_lite.bucket import Bucket
    from torchtitan_lite.checkpointing.remote import Remote


@dataclass
class Found:
    """The newest complete checkpoint of several."""

    folder: Path | None = None  # None: none is complete
    damaged: list[Path] = field(default_factory=list)  # newer ones
    notes: list[str] = field(default_factory=list)  # their problems
    forked: bool = False  # whether it belongs to a different run


def candidates(path: Path) -> list[Path]:
    """Return the checkpoints of a run or in a folder, newest first, or the path if it is one. They may be damaged.

    Raises:
        CheckpointError: there is none.
    """
    if storage.is_checkpoint(path):
        return [path]
    checkpoints = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if steps := storage.find_steps(checkpoints):
        return [storage.step_folder(checkpoints, step) for step in reversed(steps)]
    problem = "is not a run with a checkpoint, or a checkpoint" if path.exists() else "does not exist"
    runs = sorted(str(found.parent) for where in (path, path.parent) for found in where.glob("*/checkpoints"))
    there = f"; runs there: {', '.join(runs[:8])}" if runs else "" if path.exists() else not_downloaded(path)
    raise CheckpointError(f"{path} {problem}{there}")


def newest_complete(folders: Iterable[Path], verify: Callable[[Path], list[str]] = storage.verify) -> Found:
    """Return the first of these folders in which `verify` finds no problem."""
    found = Found()
    for folder in folders:
        if not (problems := verify(folder)):
            found.folder = folder
            return found
        found.damaged.append(folder)
        found.notes.append(f"damaged: {'; '.join(problems)}")
    return found


def find(path: Path, mode: str = "full") -> tuple[Path, list[str]]:
    """Return the newest complete checkpoint that a path means, and the problems of newer ones, in one process.

    Args:
        mode: what to verify, see storage.verify_file.

    Raises:
        CheckpointError: there is none.
    """
    found = newest_complete(candidates(path), partial(storage.verify, mode=mode))
    if found.folder is None:
        raise CheckpointError("\n  ".join(["no checkpoint is complete:", *found.notes]))
    return found.folder, found.notes


# --- a run that resumes -----------------------------------------------------------------------------------------


def checkpoint_to_resume(
    checkpoints: Path,
    config: CheckpointConfig,
    process: Process,
    remote: "Remote | None" = None,
    tensors: Tensors | None = None,
) -> Found:
    """Return the newest complete checkpoint of the run; if it has none, of the run or folder in `config.resume`.

    Args:
        remote: the run's bucket, whose files are fetched as needed.
        tensors: those to load, by sharded state dict name, if each machine has its own disk.

    Raises:
        CheckpointError: on every rank: no existing checkpoint is complete, or `config.resume` has none.
    """

    problems = remote.refresh() if remote else []

    @progress.working("listing the checkpoints")
    def list_them() -> list[Any]:
        wrong = [*problems, *storage.incomplete_folders(checkpoints)]
        folders = [storage.step_folder(checkpoints, step) for step in reversed(storage.find_steps(checkpoints))]
        folders = [folder for folder in folders if remote is None or remote.counts(folder)]
        forked = bool(config.resume and not (folders or wrong))
        if forked:
            folders = candidates(expand(config.resume))
        return [[str(folder) for folder in folders], wrong, forked]

    folders, wrong, forked = on_rank0(list_them, process.untimed)
    if remote and not forked:
        folders = [checkpoints / Path(folder).name for folder in folders]  # on this machine

    def verify(folder: Path) -> list[str]:
        own = remote.bucket if remote else None
        return verify_together(folder, config.verify, process, storage.bucket_of(folder) if forked else own, tensors)

    found = newest_complete(map(Path, folders), verify)
    found.notes[:0], found.forked = wrong, forked
    if found.notes and not found.folder:
        advice = "start a new run with --run.name=NEW, from the beginning or from a different checkpoint"
        raise CheckpointError("\n  ".join(["no checkpoint is complete:", *found.notes, advice]))
    return found


def verify_together(
    folder: Path, mode: str, process: Process, bucket: "Bucket | None" = None, tensors: Tensors | None = None
) -> list[str]:
    """Return all problems of a checkpoint, on every rank; empty if complete. The ranks share the hashing.

    A full state dict may be on a local disk of the first machine, so only that machine's ranks hash it.

    Args:
        bucket: from which missing and damaged files are fetched.
        tensors: those to load, by sharded state dict name, if each machine has its own disk; it then verifies only the
            files that its ranks read.
    """

    @progress.working(f"reading the manifest of {folder.name}")
    def read_manifest() -> list[Any]:
        manifest, problem = storage.check_manifest(folder)
        # all ranks use rank 0's number of local ranks: other machines may have more or fewer
        return [manifest and [manifest.files, manifest.state_dict, manifest.claim], problem, process.local_world_size]

    about, problem, n_sharing = on_rank0(read_manifest, process.untimed)
    if problem:
        return [problem]
    files, kind, claim = about
    names, first = sorted(files, key=lambda name: -files[name]["bytes"]), process.rank
    if kind == "sharded" and tensors:
        read = on_all(lambda: files_read(folder, tensors), process.untimed)
        first, n_sharing = local_rank(), process.local_world_size
        names = sorted({*itertools.chain.from_iterable(read[process.rank - first :][:n_sharing])})
    elif kind == "sharded":
        n_sharing = process.world_size
    own = {name: FileRecord(**files[name]) for name in (names[first::n_sharing] if first < n_sharing else [])}

    @progress.working(f"verifying its share of {folder.name}")
    def verify() -> list[str]:
        checked = (storage.intact(folder, name, record, mode, bucket, claim) for name, record in own.items())
        return [problem for problem in checked if problem]

    return [problem for problems in on_all(verify, process.untimed) for problem in problems]


def files_read(folder: Path, tensors: Tensors) -> list[str]:
    """Return the files of a sharded checkpoint that this rank reads, to load these tensors."""
    places = read_places(folder)
    own = {name: tensor for name, tensor in tensors.items() if name in places.specs}
    return [*Reads(folder, places, own).files, storage.STATE]


def config_to_resume(run: Path, resume: str, url: str = "") -> Mapping[str, Any]:
    """Return the config of the checkpoint that this process expects to resume from, unverified; {} if none.

    Args:
        run: the run's folder.
        resume: `checkpoint.resume`.
        url: of the run, with `run.remote`.

    Raises:
        FormatError: an incompatible version of torchtitan_lite wrote it.
        UserError: the bucket can't be used.
    """
    folders = list[Path]()
    with contextlib.suppress(CheckpointError):  # the bucket has no checkpoint yet
        folders = candidates(expand(url)) if url else []
    for path in filter(None, (str(run), resume)):
        with contextlib.suppress(CheckpointError, ConfigError, OSError, RuntimeError, ValueError):
            folders += candidates(expand(path))
        for folder in sorted(folders, key=lambda folder: (len(folder.name), folder.name), reverse=True):
            with contextlib.suppress(CheckpointError):  # damaged
                state = storage.read_state(folder)
                return state.config if path == str(run) else state.settings  # a fork begins in the phase
    return {}
