"""What a run works with in this process: what is trained, the services around it, the work beside the steps, the state.

A function takes those of them that it reads. Those that read most of them take the Session.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchtitan_lite.checkpointing.save import BaseCheckpointer
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.loader import PrefetchingLoader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.distributed.process_group import World
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
    """What a step changes, and what it takes part in."""

    model: Transformer
    optimizer: GuardedOptimizer
    scaler: GradScaler
    guards: Sequence[Guard]  # each may withhold an update
    samples: Mixture  # of the training data
    loader: PrefetchingLoader  # draws from them


@dataclass(frozen=True)
class Services:
    """What is around the steps."""

    log: Log
    meter: Meter
    watchdog: Watchdog
    preemption: Preemption
    checkpointer: BaseCheckpointer


@dataclass(frozen=True)
class Look:
    """What looks at the model between two steps, and leaves records of it: the validation, the tasks, the samples."""

    name: str
    every: int  # taken after so many steps, see `due`, and after the last one
    keys: Sequence[str]  # its records have all of these
    take: Callable[["Session"], None]  # collective


@dataclass
class Beside:
    """What is done beside the steps, as far as the config asks for it."""

    validation: Look | None = None
    tasks: Look | None = None
    samples: Look | None = None
    profile: "Profile | None" = None
    questions: Mapping[str, str] = field(default_factory=dict)  # hashes of those of each task

    @property
    def looks(self) -> list[Look]:
        return [look for look in (self.validation, self.tasks, self.samples) if look is not None]


@dataclass
class Session:
    """A run in this process."""

    config: Config
    world: World
    trained: Trained
    services: Services
    beside: Beside
    state: TrainState
    resumed: TrainState | None = None  # the state as it was saved, if the run is resumed
    unread: StepRecord | None = None  # of the last step, until `settle`

    def close(self) -> None:
        """End the background threads."""
        self.trained.loader.close()
        self.services.watchdog.close()


def settle(s: Session) -> None:
    """Read the record of the last step on the host: was its update withheld, and do the ranks agree to stop?

    The host reads it one step late, while the device computes the next one: so it does not wait. What must know earlier
    calls this itself, and waits. The guards come first: a run that has diverged does not save, whoever asks it to stop.

    Raises:
        UserError: on every rank: a guard stops the run.
    """
    record, s.unread = s.unread, None
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
    """Whether a step is a multiple of `every`; 0 means never."""
    return every > 0 and step % every == 0


def stream(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """A distinct seed for each forward pass of a run."""
    digest = hashlib.sha256(f"{seed}/{step}/{micro_batch}/{rank}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
