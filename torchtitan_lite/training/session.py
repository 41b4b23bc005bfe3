"""The state of the training loop, and the parts of a step that log: checks, metrics, validation, saves."""

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from torchtitan_lite.checkpointing.save import Saved, Saver
from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.derive import Layout
from torchtitan_lite.config.schema import CheckpointConfig, Config
from torchtitan_lite.data.loader import Batches
from torchtitan_lite.data.samples import Mixture
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import SaveError
from torchtitan_lite.models import Transformer
from torchtitan_lite.monitoring import run_folder
from torchtitan_lite.monitoring.console import fitted, step_line
from torchtitan_lite.monitoring.metrics import Clock, Log, peak_memory_gib
from torchtitan_lite.monitoring.watchdog import Watchdog
from torchtitan_lite.optim.finite_guard import FiniteGuard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.optimizer import learning_rate
from torchtitan_lite.scoring.validation import Validation, eval_line, evaluate, evaluate_average
from torchtitan_lite.training.preemption import Preemption


class Saves(Protocol):
    """The part of a Checkpointer that the loop uses. (The package does not import checkpoint.py.)"""

    folder: Path
    aside: list[tuple[int, str]]
    config: CheckpointConfig
    saver: Saver

    def load(self, identity: Mapping[str, Any]) -> TrainState | None: ...
    def save(self, state: TrainState) -> None: ...
    def require_space(self) -> None: ...
    def finished(self) -> bool: ...
    def wait(self) -> Saved | None: ...


@dataclass
class Session:
    """Everything that the training loop works with."""

    config: Config
    layout: Layout
    world: World
    model: Transformer
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    guard: FiniteGuard
    preemption: Preemption
    watchdog: Watchdog
    loader: Batches
    validation: Validation
    checkpointer: Saves
    state: TrainState
    log: Log
    samples: Mixture  # the loader draws from it
    peak_tokens_per_second: float  # of all devices together; 0 if unknown
    loaded: TrainState | None = None  # the saved state, if the run is resumed
    prompts: Any = None  # training.sampling.Prompts
    tasks: Any = None  # training.tasks.Tasks
    profile: Any = None  # monitoring.profiler.Profile
    spikes: Any = None  # training.spikes.watch.Spikes
    clock: Clock = field(default_factory=Clock)
    # (2,) float64 on the device: the summed loss of all ranks and its tokens, since the last step that log.every names
    loss_since: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.restore_loss()

        def on_abort(event: str, why: str) -> None:
            run_folder.write_status(self.config.folder, self.world, "failed", self.state.step, why)
            self.log.notify(event, self.state.step, ends=True)

        self.preemption.on_abort = functools.partial(on_abort, "failure")
        self.watchdog.on_abort = functools.partial(on_abort, "stall")

    def restore_loss(self) -> None:
        """Continue the sums of `loss_since` from the state."""
        saved = self.state.loss_since or [0.0, 0.0]
        self.loss_since = torch.tensor(saved, dtype=torch.float64, device=self.world.device)

    def add_loss(self, total: Tensor, tokens: int) -> None:
        """Add the loss of a step, () float64, to `loss_since`, without waiting. One that is not finite is left out."""
        sums = torch.stack([total, torch.full_like(total, tokens)])
        self.loss_since += torch.where(total.isfinite(), sums, 0.0)

    def close(self) -> None:
        """End the background threads."""
        self.loader.close()
        self.watchdog.close()


@contextlib.contextmanager
def closed_on_error(*things: Any) -> Iterator[None]:
    """Close these objects if the block raises."""
    try:
        yield
    except BaseException:
        for thing in things:
            thing.close()
        raise


def check_previous_step(s: Session) -> None:
    """Stop the run (NonFiniteError) or record a skipped step, if the last update was not finite."""
    s.guard.check() if s.spikes is None else s.spikes.check(s)
    s.preemption.update_agreed()
    if s.guard.skipped and s.guard.skipped[-1] == s.state.step and s.state.step not in s.state.skipped:
        first = s.state.samples_consumed - s.config.train.batch_size(s.state.step)
        s.state = replace(s.state, skipped=[*s.state.skipped, s.state.step])
        s.log.record({"step": s.state.step, "skipped_samples": [first, s.state.samples_consumed]})
        s.log.info(f"SKIPPED step {s.state.step}: not finite; run samples {first} to {s.state.samples_consumed - 1}")


def validate(s: Session, step: int) -> None:
    """Evaluate the validation set, then record and log the score."""
    before = time.perf_counter()
    score = evaluate(s.model, s.validation, s.world.device)
    seconds = time.perf_counter() - before
    s.state = replace(s.state, val_loss=score.loss)
    s.log.record({"step": step, **score.record(), "eval_samples": s.validation.n_samples, "eval_s": seconds})
    s.log.info(eval_line(step, score, s.validation, seconds))
    if s.config.optim.ema_decay:
        record, line = evaluate_average(step, s.model, s.optimizer, s.validation, s.world.device)
        s.log.record(record)
        s.log.info(line)


def log_step(s: Session, step: int, loss: float, grad_norm: float, *, n_tokens: int, first: int) -> None:
    """Record and log a step. Rates cover the n_tokens since the last line, excluding saves and validations.

    `loss` is that of the step, which a replay compares. `mean_loss` is per token, over the steps since the last
    multiple of log.every: a line that a preemption adds in between does not divide them, so a resume has the same mean.
    """
    seconds, parts = s.clock.lap()
    if s.world.device.type == "cuda":
        parts.pop("optimizer_s", None)  # the host only launches the kernels
    total, counted_tokens = s.loss_since.tolist()
    record: dict[str, Any] = {
        "step": step,
        "loss": loss if math.isfinite(loss) else None,  # not finite in a skipped step
        "mean_loss": total / counted_tokens if counted_tokens else None,
        "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
        "rank_losses": [total if math.isfinite(total) else None for total in s.guard.rank_losses],  # sums
        "lr": learning_rate(s.config.optim, step, s.config.train.steps),
        "tokens": s.state.tokens,
        "tokens_per_second": n_tokens / seconds,
        "peak_memory_gib": peak_memory_gib(s.world.device),
        "seconds": seconds,
        **parts,
    }
    if s.scaler.enabled:
        record |= {"loss_scale": s.scaler.scale.item(), "skipped_steps": s.scaler.skipped_steps}
    if len(s.samples.sources) > 1:
        from torchtitan_lite.monitoring.sources import seen

        record["sources"] = seen(s.samples, s.state.samples_consumed, s.state.jumps)
    if s.peak_tokens_per_second:
        record["mfu"] = record["tokens_per_second"] / s.peak_tokens_per_second
    s.log.record(record)
    left_s = (time.perf_counter() - s.clock.started) / (step - first) * (s.config.train.steps - step)
    s.log.info(step_line(record, s.config.train.steps, parts["data_s"] / seconds, left_s), fitted)


def save(s: Session, *, last: bool) -> None:
    """Wait for the previous save, then save a checkpoint. Raises SaveError if the last save of a run fails."""
    report_save(s, wait=True)
    s.checkpointer.save(replace(s.state, grad_scaler=s.scaler.state_dict(), loss_since=s.loss_since.tolist()))
    error = report_save(s, wait=last or not s.config.checkpoint.async_save)
    if last and error:
        raise SaveError(f"the last checkpoint was not saved: {error}. Older checkpoints are untouched")


def report_save(s: Session, *, wait: bool) -> str:
    """Log a save once it is committed, or has failed. Returns the error, which does not end the run."""
    saved = s.checkpointer.wait() if wait or s.checkpointer.finished() else None
    if saved is None:
        return ""
    if saved.error:
        s.log.info(f"NOT SAVED  step {saved.step}: {saved.error}; older checkpoints are untouched, training continues")
    else:
        paused = f", training paused for {saved.stopped_s:.1f} s" if s.config.checkpoint.async_save else ""
        s.log.record({"step": saved.step, "save_s": saved.stopped_s if paused else saved.seconds, "bytes": saved.bytes})
        s.log.info(f"saved   {saved.folder}  ({saved.bytes / 2**20:.1f} MiB, {saved.seconds:.1f} s{paused})")
    if saved.note:
        s.log.info(f"note    older checkpoints were not deleted: {saved.note}")
    return saved.error
