"""A run in this process: what is trained, what is around it, the periodic work, and the state."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.sections.log import METRICS, Metric
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.loader import PrefetchingLoader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.models import Transformer
from torchtitan_lite.optim.finite_guard import Guard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.groups import Blocks
from torchtitan_lite.optim.guarded import GuardedOptimizer
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run.metrics import Log, Meter
from torchtitan_lite.run.preemption import Preemption
from torchtitan_lite.run.rank_seconds import RankSeconds
from torchtitan_lite.run.source_losses import SourceLosses
from torchtitan_lite.run.watchdog import Watchdog

if TYPE_CHECKING:  # loaded only if the config asks for it
    from torchtitan_lite.run.profiler import Profile


@dataclass(frozen=True)
class Periodic:
    """Work between steps: its name, and when it runs."""

    name: str
    every: int  # steps; 0: only after the last step
    run: Callable[["Session", Any], None]  # collective; gets the step's StepRecord, None before the first step
    at_stop: bool = False  # also when the ranks have agreed to stop; the rest then waits for the next start
    keys: Sequence[str] = ()  # of an evaluation, whose records of a step have all of these keys together

    def due(self, step: int, last: int, *, stops: bool = False) -> bool:
        """Return whether it runs after this step, of a run with `last` steps or one that `stops` now."""
        if stops:
            return self.at_stop
        return step == last or due(step, self.every)


class Session:
    """A run in this process. `train.build` fills it."""

    # what a step reads and trains
    model: Transformer
    optimizer: GuardedOptimizer
    scaler: GradScaler
    guards: Sequence[Guard]  # may withhold an update
    blocks: Blocks
    source_losses: SourceLosses
    metrics: Sequence[Metric]  # of logged steps
    # what a phase may change
    phase: Config  # without phases, `config`
    samples: Mixture  # the training data
    loader: PrefetchingLoader  # draws from samples
    # what is around the steps
    meter: Meter
    rank_seconds: RankSeconds
    watchdog: Watchdog
    preemption: Preemption
    checkpointer: Checkpointer
    periodic: Sequence[Periodic]  # in the order of a step
    profile: "Profile | None" = None
    connected_s: float  # what the groups of ranks took to connect
    # what changes from step to step
    state: TrainState
    resumed: TrainState | None = None  # the saved state, if the run resumes
    pending: StepRecord | None = None  # the last step's, until `check_previous_step` reads it

    def __init__(self, config: Config, data: DataSet, process: Process, log: Log) -> None:
        self.config = config
        self.data = data
        self.process = process
        self.log = log

    def measure(self) -> None:
        """Build what measures the steps of model, samples and meter."""
        self.blocks = Blocks(self.model, self.config.fsdp.mesh_shape(self.process.world_size)[0])
        self.rank_seconds = RankSeconds(self.model, self.process, self.meter, self.log)
        self.source_losses = SourceLosses(self.model, self.samples.names)
        own = [METRICS[name] for name in self.config.log.metrics]
        self.metrics = [*self.model.metrics, *own, self.rank_seconds.metric, self.source_losses.metric]

    def close(self) -> None:
        """End the background threads."""
        self.loader.close()
        self.watchdog.close()
        if self.checkpointer.remote:
            self.checkpointer.remote.close()


def check_previous_step(s: Session) -> None:
    """Check on the host whether the last step's update was withheld, and whether the ranks agree to stop.

    The host reads the record one step late, when the device already has the next step's work. Code that must know
    earlier calls this at once. Guards come first: a diverged run does not save, even if asked to stop.

    Raises:
        UserError: on every rank: a guard stops the run.
    """
    record, s.pending = s.pending, None
    if record is None:
        return
    for guard in s.guards:
        if incident := guard.check(record):
            if incident.line:
                s.log.record({"step": record.step, **incident.record})
                s.log.info(incident.line)
            if incident.error:
                raise incident.error
    s.preemption.agreed |= record.numbers.stop_requests > 0


def due(step: int, every: int) -> bool:
    """Return whether a step is a multiple of `every`; 0 means never."""
    return every > 0 and step % every == 0


def forward_seed(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """Return a distinct seed for each forward pass of a run."""
    digest = hashlib.sha256(f"{seed}/{step}/{micro_batch}/{rank}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def build_profile(config: Config, process: Process) -> "Profile | None":
    """Build the profiler, if there are steps to profile."""
    if not config.profile.steps:
        return None
    from torchtitan_lite.run.profiler import Profile

    return Profile(config.profile, config.folder, process)
