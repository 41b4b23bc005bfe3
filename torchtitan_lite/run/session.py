"""A run in this process: what is trained, the services around it, the periodic work, and the state.

Functions take the parts that they read. Those that read most of them take the Session.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.loader import PrefetchingLoader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.models import Transformer
from torchtitan_lite.optim.finite_guard import Guard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.guarded import GuardedOptimizer
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run.metrics import Log, Meter
from torchtitan_lite.run.preemption import Preemption
from torchtitan_lite.run.watchdog import Watchdog

if TYPE_CHECKING:  # loaded only if the config asks for it
    from torchtitan_lite.run.profiler import Profile


@dataclass(frozen=True)
class Trained:
    """Model, optimizer, loss scaler, guards and data of the training step."""

    model: Transformer
    optimizer: GuardedOptimizer
    scaler: GradScaler
    guards: Sequence[Guard]  # may withhold an update
    samples: Mixture  # the training data
    loader: PrefetchingLoader  # draws from samples


@dataclass(frozen=True)
class Services:
    """Services that the loop calls around the steps."""

    log: Log
    meter: Meter
    watchdog: Watchdog
    preemption: Preemption
    checkpointer: Checkpointer


@dataclass(frozen=True)
class Evaluation:
    """Evaluates the model between steps and writes records: validation, tasks or samples."""

    name: str
    every: int  # steps, see `due`; also runs after the last step
    keys: Sequence[str]  # its records of a step have all of these keys together
    run: Callable[["Session"], None]  # collective


@dataclass
class PeriodicWork:
    """The evaluations and the profiler that the config asks for."""

    validation: Evaluation | None = None
    tasks: Evaluation | None = None
    samples: Evaluation | None = None
    profile: "Profile | None" = None
    task_hashes: Mapping[str, str] = field(default_factory=dict)  # by task: a hash of its questions

    @property
    def evaluations(self) -> list[Evaluation]:
        return [one for one in (self.validation, self.tasks, self.samples) if one is not None]


@dataclass
class Session:
    """A run in this process."""

    config: Config
    process: Process
    trained: Trained
    services: Services
    periodic: PeriodicWork
    state: TrainState
    resumed: TrainState | None = None  # the saved state, if the run resumes
    pending: StepRecord | None = None  # the last step's, until `check_pending` reads it

    def close(self) -> None:
        """End the background threads."""
        self.trained.loader.close()
        self.services.watchdog.close()


def check_pending(s: Session) -> None:
    """Check on the host whether the last step's update was withheld, and whether the ranks agree to stop.

    The host reads the record one step late, when the device already has the next step's work, so the device does not
    idle. Code that must know earlier calls this at once. Guards come first: a diverged run does not save, even if
    asked to stop.

    Raises:
        UserError: on every rank: a guard stops the run.
    """
    record, s.pending = s.pending, None
    if record is None:
        return
    for guard in s.trained.guards:
        if incident := guard.check(record):
            s.services.log.record({"step": record.step, **incident.record})
            s.services.log.info(incident.line)
            if incident.error:
                raise incident.error
    s.services.preemption.agreed |= record.numbers.stop_requests > 0


def due(step: int, every: int) -> bool:
    """Return whether a step is a multiple of `every`; 0 means never."""
    return every > 0 and step % every == 0


def forward_seed(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """Return a distinct seed for each forward pass of a run."""
    digest = hashlib.sha256(f"{seed}/{step}/{micro_batch}/{rank}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
