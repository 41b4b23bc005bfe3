"""Checkpoint folders on disk: layout, verification and commit. Single-process, for training and tools alike.

    checkpoints/step-00000100/model.safetensors, optimizer.safetensors       state_dict = "full": whole tensors
                              shard-00000-of-00004.safetensors               state_dict = "sharded": see shards.py
                              state.json                                     TrainState
                              manifest.json                                  written last: size and SHA-256 of each file
                .tmp-*          being written, or left by a killed run: never read, removed by the next save
                .trash-*        being deleted

A save writes into a hidden folder and syncs it. The rename at the end commits it. Functions that read raise
CheckpointError for damage, UnreadableError for an I/O error, and FormatError for checkpoints of an
incompatible version of torchtitan_lite.
"""

import contextlib
import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import torch

from torchtitan_lite import __version__
from torchtitan_lite.checkpointing.safetensors_file import (
    DTYPES,
    FileRecord,
    TensorSpecs,
    sha256_of,
    write_text,
)
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.errors import CheckpointError, FormatError, SaveError, UnreadableError, shortened
from torchtitan_lite.files import sync_folder
from torchtitan_lite.terminal import size

if TYPE_CHECKING:  # loaded only if there is a URL
    from torchtitan_lite.bucket import Bucket

FORMAT_VERSION = 7  # of manifest.json and state.json, including the names of config keys
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
# these mean that a checkpoint is damaged; any other OSError is an I/O error
_MISSING = FileNotFoundError, NotADirectoryError, IsADirectoryError


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.json."""

    step: int
    state_dict: str  # "full" or "sharded"
    world_size: int
    format_version: int
    layout: Mapping[str, Any] | None  # shards.Layout of a sharded state dict, since format 7
    files: Mapping[str, FileRecord]
    claim: str = ""  # under which a run with `run.remote` saved it, see remote.py

    @property
    def bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise CheckpointError if a file is missing or has invalid content, and UnreadableError for an I/O error."""
    try:
        yield
    except (*_MISSING, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None
    except OSError as error:
        raise UnreadableError(
            f"{error.filename or path} can't be read: {error.strerror or error}. This is an I/O error, not damage, and "
            "nothing was changed. Make the file readable and start the same command again"
        ) from None


# --- finding ----------------------------------------------------------------------------------------------------


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder has a manifest. The checkpoint may be damaged."""
    return (folder / MANIFEST).is_file()


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def find_steps(checkpoints: Path) -> list[int]:
    """Return the steps of all folders with a manifest, ascending. They may be damaged, see `verify`."""
    steps = []
    with reading(checkpoints), contextlib.suppress(*_MISSING):
        for folder in checkpoints.iterdir():
            if match := _NAME.fullmatch(folder.name):
                with contextlib.suppress(*_MISSING):  # also if retention deletes it meanwhile
                    (folder / MANIFEST).stat()
                    steps.append(int(match[1]))
    return sorted(steps)


def incomplete_folders(checkpoints: Path) -> list[str]:
    """Return the problems of folders that look like checkpoints but are not."""
    named = sorted(checkpoints.glob("step*"))
    bad = [entry for entry in named if not (_NAME.fullmatch(entry.name) and is_checkpoint(entry))]
    return [f"{entry}: not a folder step-N with a {MANIFEST}" for entry in bad]


# --- reading ----------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    with reading(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it is not a JSON object")
        return content


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest, and check its format and its own hash."""
    content = read_json(folder / MANIFEST)
    version = content.get("format_version")
    if version not in (6, FORMAT_VERSION):
        raise FormatError(
            f"{folder} has format {shortened(version)}, but this version reads 6 and {FORMAT_VERSION}: with the "
            "version that wrote it (format 2: commit 6b3ed8e, the last of 0.4), finish the run, or export the "
            "checkpoint (python checkpoint.py export) and start here from the export with model.init_from"
        )
    if content.pop("sha256", "") != _hash_of(content):
        raise CheckpointError(f"{folder / MANIFEST} is damaged: its SHA-256 does not match its content")
    files = {name: FileRecord(**record) for name, record in content["files"].items()}
    content = {"layout": None, "claim": "", **content, "files": files}
    return Manifest(**{field.name: content[field.name] for field in fields(Manifest)})


def _hash_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_state(folder: Path) -> TrainState:
    """Read the state.json of a checkpoint."""
    read_manifest(folder)  # raises if the format differs
    content = read_json(folder / STATE)
    with reading(folder / STATE):
        return TrainState(**content)


def verify_file(folder: Path, name: str, record: FileRecord, mode: str) -> str:
    """Return the problem of a file, or "". Mode "full" compares hash and size, "size" the size, "off" nothing."""
    path = folder / name
    try:
        with reading(path):
            if mode != "off" and (n_bytes := path.stat().st_size) != record.bytes:
                return f"{path}: {n_bytes:,} bytes; the manifest says {record.bytes:,}"
            if mode == "full" and sha256_of(path) != record.sha256:
                return f"{path}: its SHA-256 does not match the manifest: the file is damaged"
    except CheckpointError as error:
        return str(error)
    return ""


def check_manifest(folder: Path) -> tuple[Manifest | None, str]:
    """Return the manifest, or its problem."""
    try:
        return read_manifest(folder), ""
    except CheckpointError as error:
        return None, str(error)


def intact(folder: Path, name: str, record: FileRecord, mode: str, bucket: "Bucket | None", claim: str) -> str:
    """Verify a file; if it is missing or damaged, fetch it from the bucket, if there is one. Returns its problem."""
    problem = verify_file(folder, name, record, "size" if bucket and mode == "off" else mode)
    if problem and bucket:
        lacking = bucket.fetch_file(folder, name, record, claim)
        return lacking and f"{problem}; {lacking}"
    return problem


def verify(folder: Path, mode: str = "full") -> list[str]:
    """Return all problems of a checkpoint; empty if it is complete. Fetches what a copy from a bucket lacks."""
    manifest, problem = check_manifest(folder)
    if manifest is None:
        return [problem]
    bucket, claim = bucket_of(folder), manifest.claim
    checked = (intact(folder, name, record, mode, bucket, claim) for name, record in manifest.files.items())
    return [problem for problem in checked if problem]


def bucket_of(folder: Path) -> "Bucket | None":
    """Return the bucket of a checkpoint in the cache; None if it is not a copy."""
    origin = folder.parent.parent / ".bucket"
    if not origin.is_file():
        return None
    from torchtitan_lite.bucket import Bucket

    return Bucket(origin.read_text())


def open_tensors(file: Path) -> Any:
    """Memory-map a safetensors file; `get_tensor(name)` reads one tensor."""
    with reading(file):
        return safetensors.safe_open(file, framework="pt")


def read_specs(file: Path) -> TensorSpecs:
    """Return the dtype and shape of every tensor in a safetensors file, from its header."""
    with open_tensors(file) as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  # not a dict
        return {name: (DTYPES[part.get_dtype()], tuple(part.get_shape())) for name, part in slices.items()}


# --- writing ----------------------------------------------------------------------------------------------------


def new_folder(checkpoints: Path, step: int, suffix: str = "") -> Path:
    """Make a hidden folder for writing a checkpoint. Its name ends in `suffix`, by default a random one.

    Raises:
        OSError: e.g. the parent of `checkpoints` does not exist.
    """
    checkpoints.mkdir(exist_ok=True)  # no parents: an unmounted file system must not be replaced by a folder
    folder = checkpoints / f".tmp-{step_folder(checkpoints, step).name}-{suffix or uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder


def remove_leftovers(checkpoints: Path) -> None:
    """Remove what killed processes left. Only for the process that holds the run's lock: a save may be going on."""
    for left in (*checkpoints.glob(".tmp-*"), *checkpoints.glob(".trash-*")):
        shutil.rmtree(left, ignore_errors=True)


def commit(
    folder: Path,
    state: TrainState,
    state_dict: str,
    world_size: int,
    files: Mapping[str, FileRecord],
    layout: Mapping[str, Any] | None = None,
    claim: str = "",
) -> Path:
    """Commit a written folder, and return its final path. Replaces a damaged checkpoint of this step.

    Args:
        files: the files written into it, already synced.
        layout: the fields of shards.Layout, of a sharded state dict.
        claim: of a run with `run.remote`. Other machines have some of the files.

    Raises:
        OSError, CheckpointError: not committed. (If only the last sync fails: committed, but perhaps not on the disk.)
    """
    for name, record in () if claim else files.items():
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
        **({"layout": layout} if layout else {}),
        **({"claim": claim} if claim else {}),
        "files": {name: asdict(record) for name, record in sorted(files.items())},
    }
    manifest["sha256"] = _hash_of(manifest)
    write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    sync_folder(folder)
    final = step_folder(folder.parent, state.step)
    damaged = move_to_trash(final) if final.exists() else None
    folder.rename(final)
    sync_folder(folder.parent)
    if damaged is not None:
        shutil.rmtree(damaged, ignore_errors=True)
    return final


def move_to_trash(folder: Path) -> Path:
    """Rename a checkpoint, so that it is not found while it is deleted. Returns the new path."""
    return folder.rename(folder.with_name(f".trash-{folder.name}-{uuid.uuid4().hex[:8]}"))


def require_space(checkpoints: Path, n_bytes: int) -> None:
    """Raise SaveError if the disk has less free space than a checkpoint of this size needs."""
    where = next(folder for folder in (checkpoints, *checkpoints.parents) if folder.exists())
    if (free := shutil.disk_usage(where).free) < n_bytes:
        raise SaveError(
            f"a checkpoint takes {size(n_bytes)}, but {where} has only {size(free)} free: free some "
            "space, for example by deleting an old checkpoint"
        )


# --- comparing --------------------------------------------------------------------------------------------------


def require_equal(
    folder: Path,
    saved: Mapping[str, Any],
    expected: Mapping[str, Any],
    kind: str,
    advice: str = "go back to these values, or start a new run with --run.name=NAME",
) -> None:
    """Check that a checkpoint has the values of this run.

    Args:
        kind: for the message: the checkpoint "belongs to a different" one, such as "model".

    Raises:
        CheckpointError: values differ; it lists each key with both values.
    """
    if dict(saved) != dict(expected):
        from torchtitan_lite.hints import differences

        shown = differences(saved, expected)
        raise CheckpointError("\n  ".join([f"{folder} belongs to a different {kind}:", *shown, advice]))
