"""Reads from a run folder how its steps were made: config, changes by resumes, samples of each step."""

import bisect
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config, TrainConfig, default_of, known_keys
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.errors import CheckpointError, ConfigError
from torchtitan_lite.monitoring import records
from torchtitan_lite.tools.load_model import require_same_data
from torchtitan_lite.training.start import prepared

_SIZES = "global_batch_size", "batch_schedule", "steps"


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
        """The samples between a step and the one before it, which data.skip_samples skipped."""
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
    segments = _segments(loaded.config, changes_of(folder), known)
    return Record(folder, loaded.config, data, segments)


def config_of(folder: Path) -> Config:
    """The config of the newest attempt."""
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
    states = []
    for checkpoint in storage.checkpoints_of(folder / "checkpoints"):
        with contextlib.suppress(CheckpointError):
            states.append(storage.read_state(checkpoint))
    return states


def checkpoint_before(run: Path, step: int) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint before a step, if any, and the problems of newer ones."""
    checkpoints, notes = run / "checkpoints", list[str]()
    for saved in reversed([saved for saved in storage.find_steps(checkpoints) if saved < step]):
        folder = storage.step_folder(checkpoints, saved)
        problems = storage.verify(folder)
        if not problems:
            return folder, notes
        notes += [f"damaged, skipped: {problem}" for problem in problems]
    return None, notes


def changes_of(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """What resumes have changed: the step after which, and [before, now] of each changed key, oldest first.

    A key with a dot is of the config, another one of the bitwise setting.
    """
    changes: list[tuple[int, dict[str, Any]]] = []
    for record in records.read(folder / "changes.jsonl"):
        with contextlib.suppress(KeyError, TypeError):  # damaged
            changes.append((record["step"], {**record["changed"], **record.get("setting", {})}))
    return sorted(changes, key=lambda change: change[0])


def _segments(
    config: Config,
    changes: Sequence[tuple[int, dict[str, Any]]],
    known: Mapping[int, int],
) -> list[Segment]:
    """All steps of a run, also those that are to come. Where sizes contradict known positions, no start is known.

    Args:
        known: the position after these steps, 0 among them.
    """
    train, n_steps = config.train, max(config.train.steps, *known)
    trains, data = [train], [config.data]
    for _, changed in reversed(changes):
        before = {name: changed[f"train.{name}"][0] for name in _SIZES if f"train.{name}" in changed}
        trains.insert(0, TrainConfig.model_validate(trains[0].model_dump() | before))
        skipped = changed.get("data.skip_samples", [data[0].skip_samples])[0]
        data.insert(0, data[0].model_copy(update={"skip_samples": skipped}))
    afters = [0, *(after for after, _ in changes)]
    schedules = (after for one in trains for after, _ in one.batch_schedule)
    ends = {n_steps, *known, *afters, *schedules}
    segments: list[Segment] = []
    position = 0  # after the last step of `segments`
    since_known = 0  # the number of segments before the last known position
    for done, end in itertools.pairwise(sorted(after for after in ends if after <= n_steps)):
        attempt = bisect.bisect_right(afters, done) - 1
        then, to_skip = trains[attempt], data[attempt]
        size = then.batch_size(done + 1)
        while done < end:
            start = to_skip.position(position, size)
            last = done + _steps_to_a_skip(to_skip.skip_samples, start, size, end - done)
            segments.append(Segment(done + 1, last, position, start, size))
            position = start + (last - done) * size
            done = last
        if end in known:
            if position != known[end]:
                alone = segments[since_known].first == end  # its position follows from that after it
                segments[since_known:] = [
                    replace(s, start=known[end] - size if alone else -1) for s in segments[since_known:]
                ]
            since_known, position = len(segments), known[end]
    return segments


def _steps_to_a_skip(to_skip: Sequence[Sequence[int]], start: int, size: int, most: int) -> int:
    """After how many steps from this position, 1 to `most`, a step would touch a skipped range: see `position`."""
    counts = ((max((first - size - start) // size + 1, 1), end) for first, end in to_skip)
    return min([most, *(n for n, end in counts if start + n * size < end)])
