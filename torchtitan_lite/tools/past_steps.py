"""Reconstructs from a run's attempts how its steps were made: config, samples and checkpoint."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.compatibility import saved_config
from torchtitan_lite.checkpointing.find import newest_complete
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet, Source
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.errors import ConfigError, UserError
from torchtitan_lite.run import attempts as history
from torchtitan_lite.run import phases
from torchtitan_lite.run.attempts import Attempt
from torchtitan_lite.run.start_and_end import prepared
from torchtitan_lite.tools.load_model import require_same_data


class Made(NamedTuple):
    """How a step was made, or will be."""

    samples: range  # of the run
    mixture: Mixture  # has these samples
    seed: int


@dataclass(frozen=True)
class Record:
    """A run, and the steps that its attempts made or will make; of a fork, also those of the runs before it."""

    attempts: Sequence[Attempt]
    config: Config  # of the newest attempt
    data: DataSet
    sources: Mapping[Path, Source]  # of all steps, by folder
    steps: Mapping[int, Made]

    def skipped(self, step: int) -> range:
        """Return the samples that `data.skip_samples` skipped just before a step."""
        before = self.steps[step - 1].samples.stop if step - 1 in self.steps else self.attempts[0].samples
        return range(before, self.steps[step].samples.start)


def read_record(folder: Path, last: int = 10**12) -> Record:
    """Read a run folder and open its data, which is prepared again if it is no longer in the cache.

    Args:
        last: leave out the steps after this one.

    Raises:
        ConfigError: this is not a run, its config can't be read, or its data has changed.
        DataError: the data can't be read.
    """
    attempts = history.since_fork(history.of_run(folder)[1])
    loaded, data = prepared(Loaded(saved_config(folder, attempts[-1].config), {}), folder)
    require_same_data(str(folder), data, attempts[-1])
    steps: dict[int, Made] = {}
    for attempt in reversed(attempts):  # later attempts repeated the steps after `last`
        steps = steps_of(attempt, saved_config(folder, attempt.config), data, last) | steps
        last = min(last, attempt.step)
    if not steps:
        raise ConfigError(f"{folder} has no step to make: it began after step {attempts[0].step} (train.steps)")
    sources = {source.folder: source for source in (*data.sources, *data.later)}
    if forked := attempts[0].forked_from:
        with contextlib.suppress(UserError):  # the other run may be gone
            before = read_record(Path(forked).parent.parent, attempts[0].step)
            sources, steps = {**before.sources, **sources}, {**before.steps, **steps}
    return Record(attempts, loaded.config, data, sources, steps)


def steps_of(attempt: Attempt, config: Config, data: DataSet, last: int) -> dict[int, Made]:
    """Return the steps of an attempt up to `last`."""
    state = TrainState(
        step=attempt.step,
        samples_consumed=attempt.samples,
        segments=attempt.segments,
        phases=attempt.phases,
        must_match=attempt.must_match,
        config=attempt.config,
    )
    made = takewhile(lambda each: each[0] <= last, phases.steps(config, data, state))
    return {step: Made(samples, mixture, config.run.seed) for step, samples, _, mixture in made}


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
