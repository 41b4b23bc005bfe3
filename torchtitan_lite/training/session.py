"""What the loop of train.py works with, and what it says on the way: verdicts, steps, validations, saves."""

import math
import time
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
from torchtitan_lite.monitoring import mfu, run_folder
from torchtitan_lite.monitoring.console import fitted, step_line
from torchtitan_lite.monitoring.metrics import Clock, Log, peak_memory_gib
from torchtitan_lite.monitoring.watchdog import Watch
from torchtitan_lite.optim.finite_guard import FiniteGuard
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.optimizer import learning_rate
from torchtitan_lite.training.evaluate import Score, Validation, evaluate
from torchtitan_lite.training.preemption import Leaving
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
class Training:
    """What the loop works with."""

    config: Config
    layout: Layout
    world: World
    model: Transformer
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    guard: FiniteGuard
    leaving: Leaving
    watch: Watch
    loader: Batches
    validation: Validation
    prompts: Prompts
    checkpointer: Saves
    state: TrainState
    log: Log
    clock: Clock
    samples: Mixture  # what the loader draws from
    profile: Any  # monitoring.profiler.Profile, or None
    flops_per_token: int
    peak_flops: float  # of all devices together, per second; 0 where it is not known
    loaded: TrainState | None = None  # the state as it was saved, if the run is resumed

    def __post_init__(self) -> None:
        def last_words(why: str) -> None:
            run_folder.write_status(self.config.folder, self.world, "failed", self.state.step, why)

        self.leaving.last_words = self.watch.last_words = last_words

    def close(self) -> None:
        """End the threads that work beside the loop."""
        self.loader.close()
        self.watch.close()


def peak_flops(config: Config, world: World) -> float:
    """What all devices of a run can compute per second in its dtype, as their makers say; 0 if one is not known."""
    device = mfu.named(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    if device is None:
        return 0.0
    return world.world_size * (device.fp32_flops if config.fsdp.param_dtype == "float32" else device.bf16_flops)


def judge(t: Training) -> None:
    """Read the verdict on the last step: stop the run, or record that it was skipped.

    Raises:
        NonFiniteError
    """
    t.guard.raise_if_bad()
    if t.guard.skipped and t.guard.skipped[-1] == t.state.step and t.state.step not in t.state.skipped:
        first = t.state.samples_consumed - t.config.train.global_batch_size
        t.state = replace(t.state, skipped=[*t.state.skipped, t.state.step])
        t.log.record({"step": t.state.step, "skipped_samples": [first, t.state.samples_consumed]})
        t.log.say(f"SKIPPED step {t.state.step}: not finite; run samples {first} to {t.state.samples_consumed - 1}")


def validate(t: Training, step: int) -> None:
    """Score the validation set, and say what a model without context would reach."""
    before = time.perf_counter()
    score = evaluate(t.model, t.validation, t.world.device)
    seconds = time.perf_counter() - before
    t.state = replace(t.state, val_loss=score.loss)
    values = {
        "val_loss": score.loss,
        "val_loss_stderr": score.loss_stderr,
        "val_bits_per_byte": score.bits_per_byte,
        "val_bits_per_byte_stderr": score.bits_per_byte_stderr,
        "unigram_bits_per_byte": score.unigram_bits_per_byte,
    }
    finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
    t.log.record({"step": step, **finite, "eval_samples": t.validation.n_samples, "eval_s": seconds})
    t.log.say(eval_line(step, score, t.validation, seconds))


def log_step(t: Training, step: int, loss: float, grad_norm: float, *, n_tokens: int, first: int) -> None:
    """The step line and its record. Rates are over the n_tokens since the last line, without saves and validations."""
    seconds, parts = t.clock.lap()
    if t.world.device.type == "cuda":
        parts.pop("optimizer_s", None)  # the host only starts it
    record: dict[str, Any] = {
        "step": step,
        "loss": loss if math.isfinite(loss) else None,  # of a step that was skipped
        "grad_norm": grad_norm if math.isfinite(grad_norm) else None,  # float16: a step that was skipped
        "lr": learning_rate(t.config.optim, step, t.config.train.steps),
        "tokens": t.state.tokens,
        "tokens_per_second": n_tokens / seconds,
        "peak_memory_gib": peak_memory_gib(t.world.device),
        "seconds": seconds,
        **parts,
    }
    if t.scaler.enabled:
        record |= {"loss_scale": t.scaler.scale.item(), "skipped_steps": t.scaler.skipped_steps}
    if len(t.samples.sources) > 1:
        record["sources"] = t.samples.seen(t.state.samples_consumed)
    if t.peak_flops:
        record["mfu"] = record["tokens_per_second"] * t.flops_per_token / t.peak_flops
    t.log.record(record)
    left_s = (time.perf_counter() - t.clock.started) / (step - first) * (t.config.train.steps - step)
    t.log.say(step_line(record, t.config.train.steps, parts["data_s"] / seconds, left_s), fitted)


def source_lines(t: Training) -> list[str]:
    """What a run has seen of each source of a mixture."""
    if len(t.samples.sources) < 2:
        return []
    seen = t.samples.seen(t.state.samples_consumed)
    return [f"data    {name}: {s['tokens']:,} tokens seen, {s['epochs']:.2f} epochs" for name, s in seen.items()]


def save(t: Training, *, last: bool) -> None:
    """Save a checkpoint, after the one before.

    Raises:
        SaveError: the last one of a run could not be written.
    """
    report_save(t, wait=True)
    t.checkpointer.save(replace(t.state, grad_scaler=t.scaler.state_dict()))
    error = report_save(t, wait=last or not t.config.checkpoint.async_save)
    if last and error:
        raise SaveError(f"the last checkpoint was not saved: {error}. Older checkpoints are untouched")


def report_save(t: Training, *, wait: bool) -> str:
    """Say what came of a save, and only then that it is saved. Returns the error of a failed one.

    A failed save does not end a run: older checkpoints are there still, and the next one may succeed.
    """
    saved = t.checkpointer.wait() if wait or t.checkpointer.finished() else None
    if saved is None:
        return ""
    if saved.error:
        t.log.say(f"NOT SAVED  step {saved.step}: {saved.error}; older checkpoints are untouched, training goes on")
    else:
        beside = f", training stood still for {saved.stopped_s:.1f} s" if t.config.checkpoint.async_save else ""
        t.log.record({"step": saved.step, "save_s": saved.stopped_s if beside else saved.seconds, "bytes": saved.bytes})
        t.log.say(f"saved   {saved.folder}  ({saved.bytes / 2**20:.1f} MiB, {saved.seconds:.1f} s{beside})")
    if saved.note:
        t.log.say(f"note    older checkpoints were not deleted: {saved.note}")
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
