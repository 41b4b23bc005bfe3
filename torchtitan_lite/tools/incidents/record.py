"""What a run folder says about its steps: the config, the changes of resumes, and the samples of each step."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli
from numpy.typing import NDArray

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.schema import Config, TrainConfig, default_of, known_keys
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.errors import CheckpointError, ConfigError
from torchtitan_lite.tools.scoring.trained import require_same_data
from torchtitan_lite.training.start import prepared

_SIZES = "global_batch_size", "batch_schedule"


@dataclass(frozen=True)
class Record:
    """A run, with its config in steps and its data."""

    folder: Path
    config: Config
    data: DataSet
    consumed: NDArray[np.int64]  # (steps + 1,) the position in the data at the beginning, and after each step
    sizes: NDArray[np.int64]  # (steps,) samples of each step

    def samples(self, step: int) -> range:
        """The samples of the run that a step sees.

        Raises:
            ConfigError: the position of the step is not known.
        """
        before, end = self.consumed[step - 1 : step + 1].tolist()
        if min(before, end) < 0:
            raise ConfigError(
                f"{self.folder}: it is not known which samples step {step} saw: the checkpoints before and after it "
                "are another number of samples apart than train.global_batch_size and changes.jsonl give"
            )
        return range(end - int(self.sizes[step - 1]), end)

    def skipped(self, step: int) -> range:
        """The samples between a step and the one before it: skipped by a rewind, or by data.skip_samples."""
        return range(int(self.consumed[step - 1]), self.samples(step).start)


def read_record(folder: Path) -> Record:
    """Read a run folder, and open its data, which is prepared again if it is no longer in the cache.

    Raises:
        ConfigError: this is no run, its config can't be read, or its data has changed.
        DataError: the data can't be read.
    """
    loaded, data = prepared(Loaded(config_of(folder), {}))
    states = _states(folder)
    for state in states[-1:]:
        require_same_data(str(folder), data, state)
    known = {0: 0, **{state.step: state.samples_consumed for state in states}}
    sizes = _sizes(loaded.config.train, changes_of(folder), max(loaded.config.train.steps, *known))
    consumed = _consumed(sizes, known, jumps_of(folder), loaded.config.data.skip_samples)
    return Record(folder, loaded.config, data, consumed, sizes)


def config_of(folder: Path) -> Config:
    """The config of the newest attempt. Keys that this version no longer has are ignored."""
    file = folder / "config.toml"
    try:
        tree = tomli.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.toml") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from None
    kept: dict[str, dict[str, Any]] = {}
    for section, name in (key.split(".") for key in known_keys()):
        if isinstance(table := tree.get(section), dict) and name in table:
            is_tuple = isinstance(default_of(f"{section}.{name}"), tuple)  # TOML has no tuples
            kept.setdefault(section, {})[name] = tuple(table[name]) if is_tuple else table[name]
    try:
        return Config.model_validate(kept, context="layers")
    except ValueError as error:
        raise ConfigError(f"{file} can't be read: {error}") from None


def _states(folder: Path) -> list[TrainState]:
    """The states of the checkpoints, oldest first. Unreadable ones are left out."""
    found = []
    for checkpoint in storage.checkpoints_of(folder / "checkpoints"):
        try:
            found.append(storage.read_state(checkpoint))
        except CheckpointError:
            continue
    return found


def jumps_of(folder: Path) -> list[list[int]]:
    """Where the run has skipped samples: [step, first, end], after that step, ascending."""
    newest = next(reversed(_states(folder)), TrainState())
    found = list(newest.jumps)
    file = folder / "metrics.jsonl"
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        if b'"rewound_samples"' not in line:
            continue
        try:  # a rewind that no checkpoint knows of yet
            record = json.loads(line)
            jump = [int(record["step"]) - 1, *map(int, record["rewound_samples"])]
            found += [jump] if jump[0] >= newest.step else []
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def abandoned(file: Path, n: int) -> Iterator[str]:
    """Notes about rewinds that abandoned a step of this number."""
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(line)
            if "back_to" in record and int(record["back_to"]) < n <= int(record["step"]):
                yield (
                    f"rewind {record['rewind']}, from step {record['step']} to {record['back_to']}, abandoned a step "
                    f"{n}. The step that is replayed is the one after the rewind"
                )


def checkpoint_before(run: Path, step: int) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint before a step, if any, and the problems of newer ones."""
    checkpoints, notes = run / "checkpoints", list[str]()
    for found in reversed([s for s in storage.find_steps(checkpoints) if s < step]):
        folder = storage.step_folder(checkpoints, found)
        problems = storage.verify(folder)
        if not problems:
            return folder, notes
        notes += [f"damaged, skipped: {problem}" for problem in problems]
    return None, notes


def changes_of(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """What resumes have changed: the step after which, and [before, now] of each changed key, oldest first.

    A key with a dot is of the config, another one of the bitwise setting.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    file = folder / "changes.jsonl"
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            entry = json.loads(line)
            found.append((int(entry["step"]), {**entry["changed"], **entry.get("setting", {})}))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return sorted(found, key=lambda change: change[0])


def _sizes(train: TrainConfig, changes: Sequence[tuple[int, dict[str, Any]]], steps: int) -> NDArray[np.int64]:
    """The batch size of each step, (steps,)."""
    found, end = np.zeros(steps, np.int64), steps
    for after, changed in [*reversed(changes), (0, {})]:
        for step in range(after + 1, end + 1):
            found[step - 1] = train.batch_size(step)
        end = min(after, end)
        before = {name: changed[f"train.{name}"][0] for name in _SIZES if f"train.{name}" in changed}
        train = TrainConfig.model_validate(train.model_dump() | before)
    return found


def _consumed(
    sizes: NDArray[np.int64], known: dict[int, int], jumps: Sequence[Sequence[int]], to_skip: Sequence[Sequence[int]]
) -> NDArray[np.int64]:
    """The position at the beginning and after each step; -1 where sizes contradict the known positions around it.

    Args:
        jumps: of the steps that were made.
        to_skip: data.skip_samples, for the steps after the last known one.
    """
    found = np.concatenate(([0], np.cumsum(sizes)))
    for after, first, end in jumps:
        found[after + 1 :] += end - first
    for step, samples in sorted(known.items()):
        found[step:] += samples - found[step]
    for before, after in itertools.pairwise(sorted(known)):
        skipped = sum(end - first for step, first, end in jumps if before <= step < after)
        if known[after] - known[before] != sizes[before:after].sum() + skipped:
            found[before + 1 : after] = -1
    made = max([*known, *(after for after, *_ in jumps)])
    for first, end in to_skip:
        starts, stops = (found[1:] - sizes)[made:], found[1 + made :]
        if len(touching := np.flatnonzero((starts < end) & (first < stops))):
            found[1 + made + touching[0] :] += end - starts[touching[0]]
    return found
