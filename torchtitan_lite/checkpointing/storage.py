"""Checkpoint folders on disk: layout, verification and commit. Single-process, for training and tools alike.

    checkpoints/step-00000100/model.safetensors, optimizer.safetensors       state_dict = "full": whole tensors
                              shard-00000-of-00004.safetensors, index.json   state_dict = "sharded": see dcp_storage.py
                              state.json                                     TrainState
                              manifest.json                                  written last: size and SHA-256 of each file
                .tmp-*          being written, or left by a killed run: never read, removed by the next save
                .convert-*      being written by `checkpoint.py convert`: never read or removed by a run
                .trash-*        being deleted

A save writes into a hidden folder and syncs it. The rename at the end commits it.
Functions that read raise CheckpointError for damage, its subclass UnreadableError for an I/O error, and FormatError for
what another version of torchtitan_lite wrote.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import safetensors
import torch
from pydantic import TypeAdapter, ValidationError

from torchtitan_lite import __version__
from torchtitan_lite.checkpointing.safetensors_file import FileRecord, sha256_of, write_text
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.errors import CheckpointError, FormatError, SaveError, UnreadableError, shortened
from torchtitan_lite.files import sync_folder
from torchtitan_lite.terminal import size

FORMAT_VERSION = 4  # of manifest.json and state.json, the names of the config keys included
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # a file name: no path, no "..", not hidden
# these mean that a checkpoint is damaged; any other OSError is an I/O error
_MISSING = FileNotFoundError, NotADirectoryError, IsADirectoryError


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.json."""

    step: int
    state_dict: str  # "full" or "sharded"
    world_size: int
    files: Mapping[str, FileRecord]

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())


# --- finding ----------------------------------------------------------------------------------------------------


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest. It may be damaged."""
    return (folder / MANIFEST).is_file()


def misnamed(folder: Path, step: int) -> str:
    """The problem of a checkpoint in a folder named after another step; "" if there is none."""
    if _NAME.fullmatch(folder.name) and folder.name != step_folder(folder.parent, step).name:
        return f"{folder} holds step {step}: it was renamed; restore its name"
    return ""


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def find_steps(checkpoints: Path) -> list[int]:
    """The steps of all folders with a manifest, ascending. They may be damaged, see `verify`."""
    try:
        names = [match for entry in checkpoints.iterdir() if (match := _NAME.fullmatch(entry.name))]
    except _MISSING:
        return []
    except OSError as error:
        raise _unreadable(checkpoints, error) from None
    return sorted(int(name[1]) for name in names if _is_file(checkpoints / name[0] / MANIFEST))


def incomplete_folders(checkpoints: Path) -> list[str]:
    """The problems of folders that look like checkpoints but are not."""
    if not checkpoints.is_dir():
        return []
    steps = {step_folder(checkpoints, step).name for step in find_steps(checkpoints)}
    others = (e.name for e in checkpoints.iterdir() if e.name.startswith("step") and e.name not in steps)
    return [f"{checkpoints / name}: not a folder step-N with a {MANIFEST}" for name in sorted(others)]


# --- reading ----------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UnreadableError: an I/O error.
        CheckpointError: it is missing, not a JSON object, or has a duplicate key.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except (*_MISSING, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r}") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key appears twice")
    return content


def _is_file(path: Path) -> bool:
    """Path.is_file, but an I/O error raises UnreadableError; newer versions of Python return False."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except _MISSING:
        return False
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UnreadableError:
    """The error for a file that can't be read now, but may be intact."""
    return UnreadableError(
        f"{path} can't be read: {error.strerror or error}. This is an I/O error, not damage, and "
        "nothing was changed. Make the file readable and start the same command again"
    )


def read_manifest(folder: Path) -> Manifest:
    """Read and validate a manifest: its format, its own hash, and that it names only files of its folder."""
    content = read_json(folder / MANIFEST)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{folder} has format {shortened(version)}, but this version reads {FORMAT_VERSION}: with the version that "
            "wrote it (format 2: commit 6b3ed8e, the last of 0.4), finish the run, or export the checkpoint (python "
            "checkpoint.py export) and start here from the export with model.init_from"
        )
    if content.pop("sha256", "") != _hash_of(content):
        raise CheckpointError(f"{folder / MANIFEST} is damaged: its SHA-256 does not match its content")
    try:
        files = {name: FileRecord(int(r["bytes"]), str(r["sha256"])) for name, r in content["files"].items()}
        manifest = Manifest(int(content["step"]), str(content["state_dict"]), int(content["world_size"]), files)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error!r}") from None
    try:
        bad = [name for name in files if not _PLAIN.fullmatch(name) or (folder / name).is_symlink()]
    except OSError as error:
        raise _unreadable(Path(error.filename or folder), error) from None
    if bad:
        raise CheckpointError(f"{folder / MANIFEST} names {bad[0]!r}, which is not a plain file of its folder")
    if STATE not in files or manifest.state_dict not in ("full", "sharded"):
        raise CheckpointError(f"{folder / MANIFEST} is damaged: no {STATE}, or an unknown state_dict")
    return manifest


def _hash_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_state(folder: Path, named_by_step: bool = True) -> TrainState:
    """The state.json of a checkpoint. With `named_by_step`, the folder has to be named after its step."""
    read_manifest(folder)  # another format has other keys
    content = read_json(folder / STATE)
    if wrong := sorted({field.name for field in fields(TrainState)} ^ content.keys()):
        raise CheckpointError(f"{folder / STATE} is damaged: missing or unknown: {', '.join(wrong)}")
    try:
        state = TypeAdapter(TrainState).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckpointError(f"{folder / STATE} is damaged: {problems}") from None
    if named_by_step and (problem := misnamed(folder, state.step)):
        raise CheckpointError(problem)
    return state


def verify_file(folder: Path, name: str, record: FileRecord, mode: str) -> str:
    """The problem of a file; "" if there is none. Mode "full" compares its hash, "size" its size, "off" nothing."""
    path = folder / name
    try:
        if mode == "off":
            return ""
        size = path.stat().st_size
        if size != record.bytes:
            return f"{path}: {size:,} bytes; the manifest says {record.bytes:,}"
        if mode == "full" and sha256_of(path) != record.sha256:
            return f"{path}: its SHA-256 does not match the manifest: the file is damaged"
    except _MISSING as error:
        return f"{path}: can't be read: {error.strerror or error}"
    except OSError as error:
        raise _unreadable(path, error) from None
    return ""


def check_manifest(folder: Path) -> tuple[Manifest | None, str]:
    """The manifest, or its problem."""
    try:
        manifest = read_manifest(folder)
    except UnreadableError:
        raise
    except CheckpointError as error:
        return None, str(error)
    problem = misnamed(folder, manifest.step)
    return (None, problem) if problem else (manifest, "")


def verify(folder: Path, mode: str = "full") -> list[str]:
    """All problems of a checkpoint; empty if it is complete."""
    manifest, problem = check_manifest(folder)
    if manifest is None:
        return [problem]
    return [problem for name, record in manifest.files.items() if (problem := verify_file(folder, name, record, mode))]


def open_tensors(file: Path) -> Any:
    """A memory-mapped safetensors file; `get_tensor(name)` reads one tensor."""
    return safetensors.safe_open(file, framework="pt")


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a safetensors file, from its header."""
    try:
        with open_tensors(file) as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118  # no dict
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from None


# --- writing ----------------------------------------------------------------------------------------------------


def begin(checkpoints: Path, step: int, *, locked: bool = True) -> Path:
    """Make a hidden folder to write a checkpoint into.

    Args:
        locked: the caller holds the run's lock, so leftovers here are from killed processes and are removed. Without
            the lock nothing is removed, and the new folder's name protects it from the run.

    Raises:
        OSError: also if the parent of `checkpoints` does not exist.
    """
    checkpoints.mkdir(exist_ok=True)  # no parents: an unmounted file system must not be replaced by a folder
    for left in (*checkpoints.glob(".tmp-*"), *checkpoints.glob(".trash-*")) if locked else ():
        shutil.rmtree(left, ignore_errors=True)
    kind = "tmp" if locked else "convert"
    folder = checkpoints / f".{kind}-{step_folder(checkpoints, step).name}-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder


def commit(
    folder: Path,
    state: TrainState,
    state_dict: str,
    world_size: int,
    files: Mapping[str, FileRecord],
    *,
    replace: bool = True,
) -> Path:
    """Commit a written folder, and return its final path.

    Args:
        files: what was written into it; already synced.
        replace: an existing checkpoint of this step, which is damaged; otherwise it is an error.

    Raises:
        OSError, CheckpointError: it is not committed; nothing else has changed.
    """
    for name, record in files.items():
        if problem := verify_file(folder, name, record, "size"):
            raise CheckpointError(f"{problem} (is the folder on a file system that all ranks share?)")
    files = {**files, STATE: write_text(folder / STATE, json.dumps(asdict(state), indent=2) + "\n")}
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "step": state.step,
        "state_dict": state_dict,
        "world_size": world_size,
        "torchtitan_lite": __version__,
        "torch": torch.__version__,
        "files": {name: asdict(record) for name, record in sorted(files.items())},
    }
    manifest["sha256"] = _hash_of(manifest)
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    sync_folder(folder)
    final = step_folder(folder.parent, state.step)
    damaged = discarded(final) if replace and final.exists() else None
    try:
        folder.rename(final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise CheckpointError(f"{final} already exists") from None
    sync_folder(folder.parent)
    if damaged is not None:
        shutil.rmtree(damaged, ignore_errors=True)
    return final


def discarded(folder: Path) -> Path:
    """Rename a checkpoint, so that it is not found while it is being deleted. Returns its path."""
    return folder.rename(folder.with_name(f".trash-{folder.name}-{uuid.uuid4().hex[:8]}"))


def require_space(checkpoints: Path, n_bytes: int, deletable: Sequence[Path] = ()) -> None:
    """Raise SaveError if the disk has less free space than a checkpoint of this size needs.

    Args:
        deletable: checkpoints that will be deleted before; their bytes count as free.
    """
    where = next(folder for folder in (checkpoints, *checkpoints.parents) if folder.exists())
    status = os.statvfs(where)
    free = status.f_bavail * status.f_frsize
    if free < n_bytes and free + sum(f.stat().st_size for folder in deletable for f in folder.iterdir()) < n_bytes:
        raise SaveError(f"a checkpoint takes {size(n_bytes)}, but {where} has only {size(free)} free")


# --- comparing --------------------------------------------------------------------------------------------------


def compare(
    folder: Path,
    saved: Mapping[str, Any],
    expected: Mapping[str, Any],
    kind: str,
    advice: str = "go back to these values, or start another run with --run.name=NAME",
) -> None:
    """Compare a checkpoint's values with those of this run.

    Args:
        kind: for the message: the checkpoint "belongs to another" one, such as "model".

    Raises:
        CheckpointError: values differ; it lists each key with both values.
    """
    if dict(saved) != dict(expected):
        from torchtitan_lite.hints import differences

        shown = differences(saved, expected)
        raise CheckpointError("\n  ".join([f"{folder} belongs to another {kind}:", *shown, advice]))
