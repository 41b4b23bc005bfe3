"""What the loop of train.py works with, and what it logs: checks, steps, validations, saves."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from torchtitan_lite.checkpointing.save import Saved
from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.derive import Layout
from torchtitan_lite.config.schema import Config
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
from torchtitan_lite.training.evaluate import Score, Validation, evaluate
from torchtitan_lite.training.preemption import Preemption
from torchtitan_lite.training.sampling import Prompts


class Saves(Protocol):
    """What the loop wants of a Checkpointer (checkpoint.py, which this package does not import)."""

    folder: Path
    aside: list[tuple[int, str]]

    def save(self, state: TrainState) -> None: ...
    def require_space(self) -> None: ...
    def finished(self) -> bool: ...
    def wait(self) -> Saved | None: ...


@dataclass
class Session:
    """What the loop works with."""

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
    prompts: Prompts
    checkpointer: Saves
    state: TrainState
    log: Log
    clock: Clock
    samples: Mixture  # what the loader draws from
    profile: Any  # monitoring.profiler.Profile, or None
    peak_tokens_per_second: float  # at the peak of all devices together; 0 if it is not known
    loaded: TrainState | None = None  # the state as it was saved, if the run is resumed

    def __post_init__(self) -> None:
        def on_abort(why: str) -> None:
            run_folder.write_status(self.config.folder, self.world, "failed", self.state.step, why)

        self.preemption.on_abort = self.watchdog.on_abort = on_abort

    def close(self) -> None:
        """End the threads that work beside the loop."""
        self.loader.close()
        self.watchdog.close()


@contextlib.contextmanager
def closed_on_error(*things: Any) -> Iterator[None]:
    """Close these if an error leaves the block."""
    try:
        yield
    except BaseException:
        for thing in things:
            thing.close()
        raise


def peak_flops(config: Config, world: World) -> float:
    """What all devices of a run can compute per second in its dtype, as their makers say; 0 if one is not known."""
    if world.device.type != "cuda":
        return 0.0
    from torchtitan_lite.monitoring import mfu

    device = mfu.named(torch.cuda.get_device_name(world.device))
    if device is None:
        return 0.0
    return world.world_size * (device.fp32_flops if config.fsdp.param_dtype == "float32" else device.bf16_flops)


def peak_tokens_per_second(config: Config, model: Transformer, world: World) -> float:
    """What the devices of a run could do at their peak: its MFU is the share that it reaches. 0 if one is not known."""
    if not (peak := peak_flops(config, world)):
        return 0.0
    from torchtitan_lite.monitoring.mfu import flops_per_token

    return peak / flops_per_token(model, config.train.seq_len)


def check_previous_step(s: Session) -> None:
    """Learn whether the last update was finite: stop the run, or record that it was skipped.

    Raises:
        NonFiniteError
    """
    s.guard.check()
    s.preemption.update_agreed()
    if s.guard.skipped and s.guard.skipped[-1] == s.state.step and s.state.step not in s.state.skipped:
        first = s.state.samples_consumed - s.config.train.global_batch_size
        s.state = replace(s.state, skipped=[*s.state.skipped, s.state.step])
        s.log.record({"step": s.state.step, "skipped_samples": [first, s.state.samples_consumed]})
        s.log.info(f"SKIPPED step {s.state.step}: not finite; run samples {first} to {s.state.samples_consumed - 1}")


def validate(s: Session, step: int) -> None:
    """Score the validation set, and say what a model without context would reach."""
    before = time.perf_counter()
    score = evaluate(s.model, s.validation, s.world.device)
    seconds = time.perf_counter() - before
    s.state = replace(s.state, val_loss=score.loss)
    values = {
        "val_loss": score.loss,
        "val_loss_stderr": score.loss_stderr,
        "val_bits_per_byte": score.bits_per_byte,
        "val_bits_per_byte_stderr": score.bits_per_byte_stderr,
        "unigram_bits_per_byte": score.unigram_bits_per_byte,
    }
    finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
    s.log.record({"step": step, **finite, "eval_samples": s.validation.n_samples, "eval_s": seconds})
    s.log.info(eval_line(step, score, s.validation, seconds))


def log_step(s: Session, step: int, loss: float, grad_norm: float, *, n_tokens: int, first: int) -> None:
    """The step line and its record. Rates are over the n_tokens since the last line, without saves and validations."""
    seconds, parts = s.clock.lap()
    if s.world.device.type == "cuda":
        parts.pop("optimizer_s", None)  # the host only starts it
    record: dict[str, Any] = {
        "step": step,
        "loss": loss if math.isfinite(loss) else None,  # of a step that was skipped
        "grad_norm": grad_norm if math.isfinite(grad_norm) else None,  # float16: a step that was skipped
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
        record["sources"] = s.samples.seen(s.state.samples_consumed)
    if s.peak_tokens_per_second:
        record["mfu"] = record["tokens_per_second"] / s.peak_tokens_per_second
    s.log.record(record)
    left_s = (time.perf_counter() - s.clock.started) / (step - first) * (s.config.train.steps - step)
    s.log.info(step_line(record, s.config.train.steps, parts["data_s"] / seconds, left_s), fitted)


def source_lines(s: Session) -> list[str]:
    """What a run has seen of each source of a mixture."""
    if len(s.samples.sources) < 2:
        return []
    seen = s.samples.seen(s.state.samples_consumed)
    return [f"data    {name}: {of['tokens']:,} tokens seen, {of['epochs']:.2f} epochs" for name, of in seen.items()]


def save(s: Session, *, last: bool) -> None:
    """Save a checkpoint, after the one before.

    Raises:
        SaveError: the last one of a run could not be written.
    """
    report_save(s, wait=True)
    s.checkpointer.save(replace(s.state, grad_scaler=s.scaler.state_dict()))
    error = report_save(s, wait=last or not s.config.checkpoint.async_save)
    if last and error:
        raise SaveError(f"the last checkpoint was not saved: {error}. Older checkpoints are untouched")


def report_save(s: Session, *, wait: bool) -> str:
    """Say what came of a save, and only then that it is saved. Returns the error of a failed one.

    A failed save does not end a run: older checkpoints are there still, and the next one may succeed.
    """
    saved = s.checkpointer.wait() if wait or s.checkpointer.finished() else None
    if saved is None:
        return ""
    if saved.error:
        s.log.info(f"NOT SAVED  step {saved.step}: {saved.error}; older checkpoints are untouched, training goes on")
    else:
        beside = f", training stood still for {saved.stopped_s:.1f} s" if s.config.checkpoint.async_save else ""
        s.log.record({"step": saved.step, "save_s": saved.stopped_s if beside else saved.seconds, "bytes": saved.bytes})
        s.log.info(f"saved   {saved.folder}  ({saved.bytes / 2**20:.1f} MiB, {saved.seconds:.1f} s{beside})")
    if saved.note:
        s.log.info(f"note    older checkpoints were not deleted: {saved.note}")
    return saved.error


def eval_line(step: int, score: Score, validation: Validation, seconds: float) -> str:
    """A validation on one line. What is not defined (see Score) is left out."""
    loss, stderr = score.loss, score.loss_stderr
    parts = [f"eval    step {step}", f"loss {loss:.4f}" + (f" +- {stderr:.4f}" if math.isfinite(stderr) else "")]
    of = f"{validation.n_samples} of {validation.n_available} sequences, {seconds:.1f} s"
    bits, stderr, unigram = score.bits_per_byte, score.bits_per_byte_stderr, score.unigram_bits_per_byte
    if not math.isnan(unigram):
        parts.append(f"bits/byte {bits:.3f}" + (f" +- {stderr:.3f}" if math.isfinite(stderr) else ""))
        of = f"unigram {unigram:.3f}; {of}"
    if unigram > 0 and math.isfinite(bits):
        gain = 100 * (1 - bits / unigram)
        of = f"{abs(gain):.0f} % {'below' if gain >= 0 else 'above'} {of}"
    return "  ".join([*parts, f"({of})"])
