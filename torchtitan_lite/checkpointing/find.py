"""Finds the checkpoint that a path or a resuming run means: the newest complete one."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_lite import progress
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.safetensors_file import FileRecord
from torchtitan_lite.checkpointing.tensor_names import Tensors
from torchtitan_lite.config.paths import expand, is_url, not_downloaded
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed.exchange import on_all, on_rank0
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.environment import local_rank
from torchtitan_lite.errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # loaded only if the config asks for it
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
        tensors: those to load from the bucket, by sharded state dict name.

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
    verify = partial(verify_together, mode=config.verify, process=process)
    if remote and not forked:
        folders = [checkpoints / Path(folder).name for folder in folders]  # on this machine
        verify = partial(remote.complete, mode=config.verify, tensors=tensors or {})
    elif forked and is_url(config.resume):
        verify = partial(verify_copies, mode=config.verify, process=process)
    found = newest_complete(map(Path, folders), verify)
    found.notes[:0], found.forked = wrong, forked
    if found.notes and not found.folder:
        advice = "start a new run with --run.name=NEW, from the beginning or from a different checkpoint"
        raise CheckpointError("\n  ".join(["no checkpoint is complete:", *found.notes, advice]))
    return found


def verify_together(folder: Path, mode: str, process: Process) -> list[str]:
    """Return all problems of a checkpoint, on every rank; empty if complete. The ranks share the hashing.

    A full state dict may be on a local disk of the first machine, so only that machine's ranks hash it.
    """

    @progress.working(f"reading the manifest of {folder.name}")
    def read_manifest() -> list[Any]:
        manifest, problem = storage.check_manifest(folder)
        # all ranks use rank 0's number of local ranks: other machines may have more or fewer
        return [manifest and manifest.files, problem, manifest and manifest.state_dict, process.local_world_size]

    files, problem, kind, n_hashing = on_rank0(read_manifest, process.untimed)
    if problem:
        return [problem]
    if kind == "sharded":
        n_hashing = process.world_size
    by_size = sorted(files.items(), key=lambda file: -file[1]["bytes"])
    own_files = by_size[process.rank :: n_hashing] if process.rank < n_hashing else []

    @progress.working(f"verifying its share of {folder.name}")
    def verify() -> list[str]:
        checked = (storage.verify_file(folder, name, FileRecord(**record), mode) for name, record in own_files)
        return [problem for problem in checked if problem]

    return [problem for problems in on_all(verify, process.untimed) for problem in problems]


def verify_copies(folder: Path, mode: str, process: Process) -> list[str]:
    """Return all problems of a checkpoint in a bucket, on every rank. Each machine fetches its own copy."""
    found = on_all(lambda: storage.verify(folder, mode) if local_rank() == 0 else [], process.untimed)
    return [problem for problems in found for problem in problems]


def config_to_resume(run: Path, resume: str, remote: str = "") -> Mapping[str, Any]:
    """Return the config of the checkpoint that this process expects to resume from, unverified; {} if none.

    Args:
        run: the run's folder.
        resume: `checkpoint.resume`.
        remote: `run.remote`. First fetches small files of the run, unless those of the folder are newer.

    Raises:
        FormatError: an incompatible version of torchtitan_lite wrote it.
        UserError: the bucket can't be used.
    """
    if remote:
        from torchtitan_lite.bucket import Bucket

        Bucket(f"{remote.rstrip('/')}/{run.name}").fetch_run(run, newest=True)
    for path in filter(None, (str(run), resume)):
        with contextlib.suppress(CheckpointError, ConfigError, OSError, RuntimeError, ValueError):
            for folder in candidates(expand(path)):
                with contextlib.suppress(CheckpointError):  # damaged
                    state = storage.read_state(folder)
                    return state.config if path == str(run) else state.settings  # a fork begins in the phase
    return {}
