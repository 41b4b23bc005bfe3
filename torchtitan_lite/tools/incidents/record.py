"""How the steps of a run were made, by its attempts: with which config, from which samples and checkpoint."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.find import newest_complete
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.monitoring import attempts as history
from torchtitan_lite.monitoring.attempts import Attempt
from torchtitan_lite.tools.load_model import config_of, require_same_data
from torchtitan_lite.training.start_and_end import prepared


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of one attempt and batch size, whose samples follow each other."""

    first: int
    last: int
    start: int  # the first sample of the first step
    size: int
    skipped: int = 0  # samples before `start`, by data.skip_samples


@dataclass(frozen=True)
class Record:
    """A run, with its data, and the steps that its attempts made or will make."""

    folder: Path
    attempts: Sequence[Attempt]
    config: Config  # of the newest attempt, in steps
    data: DataSet
    segments: list[Segment]

    @property
    def steps(self) -> range:
        """The steps of the run, also those to come; of a fork, those after its start."""
        return range(self.segments[0].first, self.segments[-1].last + 1)

    def within(self, steps: range) -> list[Segment]:
        """The parts of segments that are of these steps."""
        parts = []
        for s in self.segments:
            first, last = max(s.first, steps.start), min(s.last, steps.stop - 1)
            if first <= last:
                skipped = s.skipped if first == s.first else 0
                parts.append(Segment(first, last, s.start + (first - s.first) * s.size, s.size, skipped))
        return parts

    def samples(self, step: int) -> range:
        """The samples of the run that a step sees."""
        (segment,) = self.within(range(step, step + 1))
        return range(segment.start, segment.start + segment.size)


def read_record(folder: Path) -> Record:
    """Read a run folder, and open its data, which is prepared again if it is no longer in the cache.

    Raises:
        ConfigError: this is no run, its config can't be read, or its data has changed.
        DataError: the data can't be read.
    """
    attempts = attempts_of(folder)
    loaded, data = prepared(Loaded(config_of(folder, attempts[-1]), {}))
    require_same_data(str(folder), data, attempts[-1])
    segments: list[Segment] = []
    for attempt in attempts:  # it makes the steps after its start again
        segments = [replace(s, last=min(s.last, attempt.step)) for s in segments if s.first <= attempt.step]
        segments += _segments(attempt, config_of(folder, attempt))
    if not segments:
        raise ConfigError(f"{folder} has no step to make: it began after step {attempts[0].step} (train.steps)")
    return Record(folder, attempts, loaded.config, data, segments)


def _segments(attempt: Attempt, config: Config) -> Iterator[Segment]:
    """All steps of an attempt, also those to come."""
    train, position = config.train, attempt.samples
    changes = [after for after, _ in train.batch_schedule if attempt.step < after < train.steps]
    for done, end in itertools.pairwise([attempt.step, *changes, train.steps]):
        size = train.batch_size(done + 1)
        while done < end:
            start = config.data.position(position, size)
            # the steps until one would touch a range of data.skip_samples
            until = ((max((a - size - start) // size + 1, 1), b) for a, b in config.data.skip_samples)
            n = min([end - done, *(n for n, b in until if start + n * size < b)])
            yield Segment(done + 1, done + n, start, size, start - position)
            position, done = start + n * size, done + n


def attempts_of(folder: Path) -> Sequence[Attempt]:
    """The attempts of a run; of a fork, from the last one that began with the other run's checkpoint.

    Raises:
        ConfigError: there is none, or an older version made the folder.
    """
    history.newest_status(folder)
    attempts = history.read(folder)
    if not attempts:
        raise ConfigError(f"{folder} is not the folder of a run that has begun to train: it has no {history.FILE}")
    return history.since_fork(attempts)


def require_own_step(folder: Path, attempts: Sequence[Attempt], step: int, option: str) -> None:
    """Raise ConfigError if another run made a step, which this one was forked from."""
    if 1 <= step <= attempts[0].step:
        raise ConfigError(
            f"{option}={step}: {folder} was forked after step {attempts[0].step}, from {attempts[0].forked_from}; step "
            f"{step} is of that run"
        )


def checkpoint_before(folder: Path, attempts: Sequence[Attempt], step: int) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint before a step of this run; of a fork also the one that it began with.

    Returns:
        the checkpoint, or None for the beginning of a run, and notes about damaged newer ones.

    Raises:
        ConfigError: the checkpoint that a fork began with is gone or damaged.
    """
    checkpoints, first = folder / "checkpoints", attempts[0]
    own = [saved for saved in storage.find_steps(checkpoints) if first.step < saved < step]
    folders = [storage.step_folder(checkpoints, saved) for saved in reversed(own)]
    found = newest_complete([*folders, *([Path(first.forked_from)] if first.forked_from else [])])
    if first.forked_from and not found.folder:
        missing = f"{folder} has no complete checkpoint before step {step}, nor the one that it was forked from:"
        raise ConfigError("\n  ".join([missing, *found.notes]))
    return found.folder, found.notes
