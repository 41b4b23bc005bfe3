"""Checkpoints on disk: where they are, whether they are whole, what is in them. Any tool may use this; no ranks here.

    checkpoints/step-00000100/model.safetensors       name -> whole tensor
                              optimizer.safetensors   state.name -> whole tensor, e.g. exp_avg.output.weight
                              state.json              format_version and TrainState

A checkpoint is written into a hidden folder beside, and renamed last: a folder named step-N is whole.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from torchtitan_lite.errors import CheckpointError

FORMAT_VERSION = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class TrainState:
    """Where a run is, apart from its tensors. The position in the data is samples_consumed and nothing else."""

    step: int = 0
    tokens: int = 0
    samples_consumed: int = 0
    grad_scaler: Mapping[str, Any] = field(default_factory=dict)  # float16's, see scaler.py
    identity: Mapping[str, Any] = field(default_factory=dict)  # must be the same on a resume, by config key
    setting: Mapping[str, Any] = field(default_factory=dict)  # must be the same for a bitwise resume
    config: Mapping[str, Any] = field(default_factory=dict)  # the whole config, by "section.key"


def find_steps(checkpoints: Path) -> list[int]:
    """The steps of all whole checkpoints in a folder, in ascending order."""
    if not checkpoints.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in checkpoints.iterdir() if (entry / STATE).is_file())
    return sorted(int(match[1]) for match in matches if match)


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of a step is, or will be."""
    return checkpoints / f"step-{step:08d}"


def write(checkpoints: Path, state: TrainState, model: dict[str, Tensor], optimizer: dict[str, Tensor]) -> Path:
    """Write a checkpoint of whole tensors on the CPU, and return its folder.

    Raises:
        CheckpointError: it could not be written; nothing is left behind, and older checkpoints are untouched.
    """
    final = step_folder(checkpoints, state.step)
    beside = checkpoints / f".tmp-{final.name}"
    try:
        shutil.rmtree(beside, ignore_errors=True)  # what a killed process left
        beside.mkdir(parents=True)
        save_file(model, beside / MODEL, metadata={"format": "pt"})
        save_file(optimizer, beside / OPTIMIZER, metadata={"format": "pt"})
        text = json.dumps({"format_version": FORMAT_VERSION, **asdict(state)}, indent=2)
        (beside / STATE).write_text(text + "\n")
        for path in (*beside.iterdir(), beside):
            _sync(path)
        if final.exists():  # no whole checkpoint, or it would have been resumed from
            final.rename(checkpoints / f".bad-{final.name}")
        beside.rename(final)
        _sync(checkpoints)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(f"{final} could not be written: {error}; older checkpoints are untouched") from error
    return final


def _sync(path: Path) -> None:
    """Have the disk hold what was written to a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(folder: Path, named_by_step: bool = True) -> TrainState:
    """The state.json of a checkpoint, which by default has to be in the folder of its step.

    Raises:
        CheckpointError: it is damaged, or of a format that this version does not know.
    """
    try:
        content = json.loads((folder / STATE).read_text())
        version = content.pop("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{folder} has format_version {version}, and this version of torchtitan_lite reads {FORMAT_VERSION}"
            )
        state = TrainState(**content)
        if named_by_step and folder.name != step_folder(folder.parent, state.step).name:
            raise CheckpointError(f"{folder} holds step {state.step}: it was renamed; give it back its name")
        return state
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / STATE} can't be read ({error!r}); delete or move {folder} to go on without it"
        ) from None


def open_tensors(file: Path) -> Any:
    """A safetensors file, memory-mapped: `get_tensor(name)` reads one tensor."""
    return safetensors.safe_open(file, framework="pt")


def read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a safetensors file, from its header.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        with open_tensors(file) as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118  # no dict
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"{file} can't be read ({error}); delete or move {file.parent} to go on without it"
        ) from None


def compare(
    folder: Path,
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    what: str,
    advice: str = "go back to these values, or start another run with --run.name=NAME",
) -> None:
    """Hold what a checkpoint says against what is wanted, by key.

    Raises:
        CheckpointError: values differ; it names each key with both values.
    """
    missing = "-"
    differences = [
        f"{key} is {_show(saved.get(key, missing))} in the checkpoint and {_show(wanted.get(key, missing))} here"
        for key in sorted({*saved, *wanted})
        if saved.get(key, missing) != wanted.get(key, missing)
    ]
    if differences:
        shown = differences[:16] + ([f"and {len(differences) - 16} more"] if len(differences) > 16 else [])
        raise CheckpointError("\n  ".join([f"{folder} belongs to another {what}:", *shown, advice]))


def _show(value: Any) -> str:
    return value[:12] + "..." if isinstance(value, str) and len(value) == 64 else str(value)  # a SHA-256, shortened
