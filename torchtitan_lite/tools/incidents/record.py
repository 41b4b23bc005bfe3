"""What a run folder says about its steps: the config, the changes of resumes, and the samples of each step."""

import bisect
import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.schema import Config, TrainConfig, default_of, known_keys
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.errors import CheckpointError, ConfigError
from torchtitan_lite.tools.load_model import require_same_data
from torchtitan_lite.training.start import prepared

_SIZES = "global_batch_size", "batch_schedule"


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of one batch size, whose samples follow each other."""

    first: int
    last: int
    before: int  # the position in the data before the first step; the samples up to `start` are skipped
    start: int  # of the first step; -1: not known
    size: int


@dataclass(frozen=True)
class Record:
    """A run, with its config in steps and its data."""

    folder: Path
    config: Config
    data: DataSet
    segments: list[Segment]

    @property
    def n_steps(self) -> int:
        """The steps of the run, also those to come."""
        return self.segments[-1].last

    def within(self, steps: range) -> list[Segment]:
        """The segments that have some of these steps."""
        return [s for s in self.segments if s.first < steps.stop and s.last >= steps.start]

    def n_samples(self, steps: range) -> int:
        """How many samples these steps see."""
        parts = ((s, range(max(s.first, steps.start), min(s.last + 1, steps.stop))) for s in self.within(steps))
        return sum(segment.size * len(part) for segment, part in parts)

    def samples(self, step: int) -> range:
        """The samples of the run that a step sees.

        Raises:
            ConfigError: the position of the step is not known.
        """
        (segment,) = self.within(range(step, step + 1))
        if segment.start < 0:
            raise ConfigError(
                f"{self.folder}: it is not known which samples step {step} saw: the checkpoints before and after it "
                "are another number of samples apart than train.global_batch_size and changes.jsonl give"
            )
        first = segment.start + (step - segment.first) * segment.size
        return range(first, first + segment.size)

    def skipped(self, step: int) -> range:
        """The samples between a step and the one before it: skipped by a rewind, or by data.skip_samples."""
        (segment,) = self.within(range(step, step + 1))
        return range(segment.before if step == segment.first else self.samples(step).start, self.samples(step).start)


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
    return Record(folder, loaded.config, data, _segments(loaded.config, changes_of(folder), known, jumps_of(folder)))


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


def _segments(
    config: Config,
    changes: Sequence[tuple[int, dict[str, Any]]],
    known: Mapping[int, int],
    jumps: Sequence[Sequence[int]],
) -> list[Segment]:
    """All steps of a run, also those that are to come. Where sizes contradict known positions, no start is known.

    Args:
        known: the position after these steps, 0 among them.
        jumps: of the steps that were made. For those after the last known one, data.skip_samples applies.
    """
    train, n_steps = config.train, max(config.train.steps, *known)
    trains = [train]
    for _, changed in reversed(changes):
        before = {name: changed[f"train.{name}"][0] for name in _SIZES if f"train.{name}" in changed}
        trains.insert(0, TrainConfig.model_validate(trains[0].model_dump() | before))
    afters = [0, *(after for after, _ in changes)]
    schedules = (after for one in trains for after, _ in one.batch_schedule)
    ends = {n_steps, *known, *(after for after, *_ in jumps), *afters, *schedules}
    made = max([*known, *(after for after, *_ in jumps)])
    found: list[Segment] = []
    since, position = 0, 0  # the first segment after the last known position; the position after the last step
    for done, end in itertools.pairwise(sorted(after for after in ends if after <= n_steps)):
        size = trains[bisect.bisect_right(afters, done) - 1].batch_size(done + 1)
        start = position + sum(stop - first for after, first, stop in jumps if after == done)
        while done < end:
            last = end
            if done >= made:
                start = config.data.position(start, size)
                last = done + _steps_to_a_skip(config.data.skip_samples, start, size, end - done)
            found.append(Segment(done + 1, last, position, start, size))
            start = position = start + (last - done) * size
            done = last
        if end in known:
            if position != known[end]:
                alone = found[since].first == end  # its position follows from that after it
                found[since:] = [replace(s, start=known[end] - size if alone else -1) for s in found[since:]]
            since, position = len(found), known[end]
    return found


def _steps_to_a_skip(to_skip: Sequence[Sequence[int]], start: int, size: int, most: int) -> int:
    """After how many steps from this position, 1 to `most`, a step would touch a skipped range: see `position`."""
    counts = ((max((first - size - start) // size + 1, 1), end) for first, end in to_skip)
    return min([most, *(n for n, end in counts if start + n * size < end)])
