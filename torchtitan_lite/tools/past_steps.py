"""Reconstructs from a run's attempts how its steps were made: config, samples and checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.compatibility import saved_config
from torchtitan_lite.checkpointing.find import newest_complete
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.run import attempts as history
from torchtitan_lite.run.attempts import Attempt
from torchtitan_lite.run.start_and_end import prepared
from torchtitan_lite.tools.load_model import require_same_data


@dataclass(frozen=True)
class Record:
    """A run, its data, and the steps that its attempts made or will make; for a fork, the steps after its start."""

    attempts: Sequence[Attempt]
    config: Config  # of the newest attempt
    data: DataSet
    samples: Mapping[int, range]  # by step

    def skipped(self, step: int) -> range:
        """Return the samples that `data.skip_samples` skipped just before a step."""
        before = self.samples[step - 1].stop if step - 1 in self.samples else self.attempts[0].samples
        return range(before, self.samples[step].start)


def read_record(folder: Path) -> Record:
    """Read a run folder and open its data, which is prepared again if it is no longer in the cache.

    Raises:
        ConfigError: this is not a run, its config can't be read, or its data has changed.
        DataError: the data can't be read.
    """
    attempts = history.since_fork(history.of_run(folder)[1])
    loaded, data = prepared(Loaded(saved_config(folder, attempts[-1].config), {}), folder)
    require_same_data(str(folder), data, attempts[-1])
    samples: dict[int, range] = {}
    last = loaded.config.train.steps
    for attempt in reversed(attempts):  # later attempts repeated the steps after `last`
        samples.update(samples_of(attempt, saved_config(folder, attempt.config), last))
        last = min(last, attempt.step)
    if not samples:
        raise ConfigError(f"{folder} has no step to make: it began after step {attempts[0].step} (train.steps)")
    return Record(attempts, loaded.config, data, dict(sorted(samples.items())))


def samples_of(attempt: Attempt, config: Config, last: int) -> Iterator[tuple[int, range]]:
    """Yield the steps of an attempt up to `last`, with their samples."""
    position = attempt.samples
    for step in range(attempt.step + 1, min(config.train.steps, last) + 1):
        size = config.train.batch_size(step)
        start = config.data.position(position, size)
        position = start + size
        yield step, range(start, position)


def require_own_step(folder: Path, attempts: Sequence[Attempt], step: int, option: str) -> None:
    """Raise ConfigError if a step belongs to the run that this one was forked from."""
    if 1 <= step <= attempts[0].step:
        raise ConfigError(
            f"{option}={step}: {folder} was forked after step {attempts[0].step}, from {attempts[0].forked_from}; step "
            f"{step} belongs to that run"
        )


def checkpoint_before(folder: Path, attempts: Sequence[Attempt], step: int) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint before a step of this run; a fork may use the one it began with.

    Returns:
        the checkpoint, or None for the run's beginning, and notes about damaged newer ones.

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
