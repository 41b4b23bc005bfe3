"""What a training step works with, and what it returns: Session, Sums, StepResult, and the base of all callbacks."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_lite.checkpointing.save import BaseCheckpointer
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.loader import PrefetchingLoader
from torchtitan_lite.data.mixture import Mixture
from torchtitan_lite.distributed.process_group import World, sum_over_ranks
from torchtitan_lite.models import Transformer
from torchtitan_lite.monitoring import run_folder
from torchtitan_lite.monitoring.metrics import Log, Meter
from torchtitan_lite.monitoring.watchdog import Watchdog
from torchtitan_lite.optim.finite_guard import FiniteGuard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.guarded import GuardedOptimizer
from torchtitan_lite.training.preemption import Preemption

if TYPE_CHECKING:
    from torchtitan_lite.optim.spike_guard import SpikeGuard


class StepResult(NamedTuple):
    """The mean loss per token of the global batch, and the gradient norm before clipping.

    Both are () tensors on the device: reading them makes the host wait for it.
    """

    loss: Tensor
    grad_norm: Tensor


@dataclass
class Sums:
    """What the ranks share in a step. All are float64 tensors on the device, the same on every rank."""

    loss: Tensor  # (), the summed loss of all tokens of the global batch
    squared_norm: Tensor  # (), of the gradients, which still have the loss scale
    stop_requests: Tensor  # (), the number of ranks that were asked to stop
    rank_losses: Tensor  # (world_size,), each rank's part of the loss
    loads: Tensor | None  # (L, E), the tokens of each layer's experts, in a model that has some

    @classmethod
    def over_ranks(cls, loss: Tensor, squared_norm: Tensor, loads: Tensor | None, stop: bool, world: World) -> "Sums":
        """Sum the parts of all ranks, with one small all-reduce."""
        n, n_loads = 3 + world.world_size, 0 if loads is None else loads.numel()
        parts = torch.zeros(n + n_loads, dtype=torch.float64, device=loss.device)
        parts[0], parts[1] = loss, squared_norm
        parts[2:3].fill_(float(stop))  # parts[2] = 1.0 would make the host wait for the device
        parts[3 + world.rank] = loss  # the other ranks add 0 here
        if loads is not None:
            parts[n:] = loads.flatten()
        sum_over_ranks(parts)
        return cls(
            loss=parts[0],
            squared_norm=parts[1],
            stop_requests=parts[2],
            rank_losses=parts[3:n],
            loads=None if loads is None else parts[n:].view_as(loads),
        )


@dataclass(frozen=True)
class Callback:
    """Work beside the steps: after every `every`-th step and the last one. Its time does not count as training."""

    after: Callable[["Session", Any], object]  # with the StepResult; `s.state` includes the step
    every: int
    when_preempted: bool = False  # also after the step at which a preempted run stops
    reads_step: bool = True  # it reads what the step computed, so the host waits for the device first
    before: Callable[[int], None] | None = None  # called before each step
    done: Callable[[list[dict[str, Any]]], bool] | None = None  # by a step's records: if not, a resume makes up for it
    questions: Mapping[str, str] = field(default_factory=dict)  # hashes of what it scores: a resume reports changes


MOST_RANKS = 1024  # above so many, a record has no list of losses: it would be the most of each line


@dataclass
class Session:
    """The context of a training step. What only one callback needs is that callback's own."""

    config: Config
    world: World
    dp_replicate: int  # copies of the sharded model (HSDP)
    model: Transformer
    optimizer: GuardedOptimizer
    scaler: GradScaler
    guard: FiniteGuard
    samples: Mixture  # of the training data; the loader draws from it
    loader: PrefetchingLoader
    preemption: Preemption
    watchdog: Watchdog
    checkpointer: BaseCheckpointer
    log: Log
    state: TrainState
    resumed: TrainState | None = None  # the state as it was saved, if the run is resumed
    spikes: "SpikeGuard | None" = None  # loaded only if [spike] asks for it
    callbacks: list[Callback] = field(default_factory=list)
    loads: Tensor | None = None  # of the last step: see Sums
    put_off: bool = False  # whether a stop came before something that was due: the next start makes up for it
    meter: Meter = field(init=False)

    def __post_init__(self) -> None:
        self.meter = Meter(self.state, self.world.device)

        def on_abort(why: str) -> None:
            run_folder.end(self.config.folder, self.world, self.log.attempt, "failed", self.state.step, why)

        self.preemption.on_abort = self.watchdog.on_abort = on_abort

    @property
    def stopping(self) -> bool:
        """Whether the last step was the last one of the run, or the one at which it is preempted."""
        return self.state.step == self.config.train.steps or self.preemption.agreed

    @property
    def last_samples(self) -> list[int]:
        """The run's samples of the last step: its first, and the one after its last."""
        end = self.state.samples_consumed
        return [end - self.config.train.batch_size(self.state.step), end]

    def rank_losses(self) -> dict[str, list[float]]:
        """For a record: the sum of each rank's losses in the last step, as "rank_losses". Empty above MOST_RANKS."""
        return {"rank_losses": self.guard.rank_losses} if self.world.world_size <= MOST_RANKS else {}

    def close(self) -> None:
        """End the background threads."""
        self.loader.close()
        self.watchdog.close()


def due(step: int, every: int) -> bool:
    """Whether a step is a multiple of `every`; 0 means never."""
    return every > 0 and step % every == 0


def stream(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """A distinct seed for each forward pass of a run."""
    digest = hashlib.sha256(f"{seed}/{step}/{micro_batch}/{rank}".encode()).digest()
    return int.from_bytes(digest[:7], "little")


def report_save(s: Session, *, wait: bool) -> str:
    """Log a save once it is committed, or has failed. Returns the error, which does not end the run."""
    saved = s.checkpointer.wait() if wait or s.checkpointer.finished() else None
    if saved is None:
        return ""
    if saved.error:
        then = "" if s.stopping else ", training continues"
        s.log.info(f"NOT SAVED  step {saved.step}: {saved.error}; older checkpoints are untouched{then}")
    else:
        paused = f", training paused for {saved.stopped_s:.1f} s" if s.config.checkpoint.async_save else ""
        s.log.record({"step": saved.step, "save_s": saved.stopped_s if paused else saved.seconds, "bytes": saved.bytes})
        s.log.info(f"saved   {saved.folder}  ({saved.bytes / 2**20:.1f} MiB, {saved.seconds:.1f} s{paused})")
    if saved.note:
        s.log.info(f"note    older checkpoints were not deleted: {saved.note}")
    return saved.error
