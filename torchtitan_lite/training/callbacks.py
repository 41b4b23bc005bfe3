"""The work beside the steps, in this order: log, validate, score tasks, save, sample, profile, collect garbage."""

import contextlib
import functools
import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.distributed.ranks import on_rank0
from torchtitan_lite.errors import SaveError
from torchtitan_lite.models import Transformer
from torchtitan_lite.monitoring import attempts
from torchtitan_lite.monitoring.console import fitted, seen_of_sources, step_line
from torchtitan_lite.monitoring.metrics import peak_memory_gib
from torchtitan_lite.optim.optimizer import learning_rate
from torchtitan_lite.scoring.validation import Validation, eval_line, evaluate, evaluate_average
from torchtitan_lite.training.intact import require_equal_copies, require_finite
from torchtitan_lite.training.session import Callback, Session, StepResult, due, report_save


def build_callbacks(
    config: Config, data: DataSet, world: World, model: Transformer, validation: Validation
) -> list[Callback]:
    """The callbacks that this config asks for, in their order. Collective. UserError: one does not suit the run."""
    peak = peak_tokens_per_second(config, model, world)
    callbacks = [Callback(functools.partial(log_step, peak=peak), config.log.every, when_preempted=True)]
    if config.eval.every:
        score = functools.partial(validate, validation)
        keys = ("val_loss", "ema_val_loss") if config.optim.ema_decay else ("val_loss",)
        callbacks.append(Callback(score, config.eval.every, done=functools.partial(have, keys)))
    if config.tasks:
        from torchtitan_lite.training.tasks import Tasks

        if tasks := Tasks.of(config, data):
            done = functools.partial(have, [f"task/{name}" for name in tasks.digests])
            callbacks.append(Callback(tasks.score, config.eval.tasks_every, done=done, questions=tasks.digests))
    callbacks.append(Callback(save, config.checkpoint.every, when_preempted=True))
    if config.sample.every:
        from torchtitan_lite.training.sampling import Prompts, sample

        speak = functools.partial(sample, Prompts.of(config, data))
        callbacks.append(Callback(speak, config.sample.every, done=functools.partial(have, ["prompt"])))
    callbacks.append(Callback(lambda s, _: report_save(s, wait=False), every=1, reads_step=False))
    if config.profile.steps:
        from torchtitan_lite.monitoring.profiler import Profile

        profile = Profile(config.profile, config.folder, world)

        def end(s: Session, _: StepResult) -> None:
            if line := profile.end(s.state.step, last=s.stopping):
                s.log.info(line)

        callbacks.append(Callback(end, every=1, when_preempted=True, reads_step=False, before=profile.begin))
    if config.speed.gc_every:
        callbacks.append(Callback(lambda *_: gc.collect(), config.speed.gc_every, reads_step=False))
    return callbacks


def have(keys: Sequence[str], made: list[dict[str, Any]]) -> bool:
    """Whether each key is in one of these records."""
    return all(any(key in record for record in made) for key in keys)


def missing(s: Session) -> list[Callback]:
    """What was due at the step that a run resumes from, if a stop or a kill came before it. Collective."""
    step, steps = s.state.step, s.config.train.steps

    def unfinished() -> list[int]:
        files = "metrics.jsonl", "samples.jsonl"
        made = [r for file in files for r in attempts.records(s.config.folder, file) if r["step"] == step]
        return [i for i, callback in enumerate(s.callbacks) if callback.done and not callback.done(made)]

    if not step:
        return []
    found = [s.callbacks[i] for i in on_rank0(unfinished, s.world.untimed)]
    return [callback for callback in found if step == steps or due(step, callback.every)]


def make_up(s: Session, callbacks: list[Callback]) -> None:
    """Do what was due at the step that the run resumes from. A stop is obeyed after the first of them. Collective."""
    for callback in callbacks:
        s.watchdog.step(s.state.step)
        callback.after(s, None)
        s.preemption.agree(s.world)
    s.meter.begin()


def log_step(s: Session, result: StepResult, peak: float) -> None:
    """Record and log the step. Rates cover the time since the last line, without saves and validations.

    `loss` is that of the step, which a replay compares. `mean_loss` is the mean per token over the steps since the last
    multiple of log.every: a line that a preemption adds in between does not divide them, so a resume has the same mean.

    Args:
        peak: `peak_tokens_per_second`.
    """
    state, steps = s.state, s.config.train.steps
    lap = s.meter.lap(state.tokens)
    if s.world.device.type == "cuda":
        lap.parts.pop("optimizer_s", None)  # the host only launches the kernels
    record: dict[str, Any] = {
        "step": state.step,
        "loss": _finite(result.loss.item()),  # not finite in a skipped step
        "mean_loss": s.meter.mean_loss(),
        "grad_norm": _finite(result.grad_norm.item()),
        "lr": learning_rate(s.config.optim, state.step, steps),
        "tokens": state.tokens,
        "tokens_per_second": lap.tokens / lap.seconds,
        "peak_memory_gib": peak_memory_gib(s.world.device),
        "seconds": lap.seconds,
        **lap.parts,
    }
    record |= {key: [_finite(loss) for loss in losses] for key, losses in s.rank_losses().items()}
    if s.scaler.enabled:
        record |= {"loss_scale": s.scaler.scale.item(), "skipped_steps": s.scaler.skipped_steps}
    if len(s.samples.sources) > 1:
        record["sources"] = seen_of_sources(s.samples, state.samples_consumed, s.config.data.skip_samples)
    if s.loads is not None:  # of the step's experts: the fullest and the emptiest of a layer, as shares of its mean
        shares = s.loads / s.loads.mean(1, keepdim=True)
        record |= {"load_max": _finite(shares.max().item()), "load_min": _finite(shares.min().item())}
    if peak:
        record["mfu"] = record["tokens_per_second"] / peak
    s.log.record(record)
    left_s = s.meter.seconds_per_step(state.step) * (steps - state.step)
    s.log.info(step_line(record, steps, lap.parts["data_s"] / lap.seconds, left_s), fitted)
    if due(state.step, s.config.log.every):
        s.meter.loss_since.zero_()


def _finite(value: float) -> float | None:
    """The value for JSON, which has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def peak_tokens_per_second(config: Config, model: Transformer, world: World) -> float:
    """Tokens per second at the nominal peak of all devices, for MFU; 0 if it is unknown, as for rows of any length."""
    if config.data.objective == "pairs" or (world.device.type != "cuda" and not config.run.peak_tflops):
        return 0.0
    from torchtitan_lite.monitoring.mfu import flops_per_token, peak_flops

    return peak_flops(config, world) / flops_per_token(model, config.input_len, config.target_len)


def validate(validation: Validation, s: Session, _: StepResult | None) -> None:
    """Score the validation set; with optim.ema_decay, the average of the weights too. A stop comes first."""
    step, before = s.state.step, time.perf_counter()
    if s.preemption.agreed:
        s.put_off = True
        s.log.info(f"eval    step {step}  not scored before the run stops; the same command scores it")
        return
    score = evaluate(s.model, validation, s.world.device)
    seconds = time.perf_counter() - before
    s.log.record({"step": step, **score.record(), "eval_samples": validation.n_samples, "eval_s": seconds})
    best = s.world.rank == 0 and attempts.best_step(s.config.folder, range(1, step + 1)) == step
    s.log.info(eval_line(step, score, validation, seconds, best=best))
    if s.config.optim.ema_decay:
        record, line = evaluate_average(step, s.model, s.optimizer, validation, s.world.device)
        s.log.record(record)
        s.log.info(line)


def save(s: Session, _: StepResult) -> None:
    """Save a checkpoint, after the previous save has ended, if that runs in the background.

    Raises:
        NonFiniteError, DivergedError: on every rank: this state must not reach a checkpoint.
        SaveError: the last save of the run failed. An earlier one is only logged.
    """
    require_finite(s.model, s.state.step)
    require_equal_copies(s.model, s.optimizer, s.state.step)
    report_save(s, wait=True)
    loss_since, window = s.meter.loss_since.tolist(), s.spikes.window if s.spikes else {}
    state = replace(s.state, grad_scaler=s.scaler.state_dict(), spikes=window, loss_since=loss_since)
    s.checkpointer.save(state)
    error = report_save(s, wait=s.stopping or not s.config.checkpoint.async_save)
    if s.stopping and error:
        raise SaveError(f"the last checkpoint was not saved: {error}. Older checkpoints are untouched")


@contextlib.contextmanager
def garbage_on_schedule(every: int) -> Iterator[None]:
    """Disable automatic collection, if `every` is not 0: a callback collects at the same steps on all ranks.

    Automatic collection happens at a different step on each rank, and all ranks wait for each one. Existing objects
    (mostly torch's modules) are frozen, so a collection takes milliseconds.
    """
    if not every:
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
