"""The work between steps: log, validate, score tasks, save, sample. `train` in train.py says when each is due."""

import functools
import math
import time
from dataclasses import replace
from typing import Any

from torchtitan_lite.checkpointing.before_save import require_equal_replicas, require_finite
from torchtitan_lite.checkpointing.save import Checkpointer
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.exchange import on_rank0
from torchtitan_lite.errors import SaveError
from torchtitan_lite.optim.optimizer import learning_rate
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run import attempts
from torchtitan_lite.run.console import fitted, seen_of_sources, step_line
from torchtitan_lite.run.metrics import Log
from torchtitan_lite.run.out_of_memory import peak_memory_gib
from torchtitan_lite.run.session import Periodic, Session
from torchtitan_lite.scoring.validation import Validation, eval_line, evaluate, evaluate_average


def build_periodic_work(config: Config, data: DataSet, validation: Validation) -> tuple[list[Periodic], dict[str, str]]:
    """Build what the config asks for, in the order in which it runs after a step. Collective.

    Returns:
        the work; and by task a hash of its questions.

    Raises:
        UserError: an evaluation does not suit the run.
    """
    work, task_hashes = [Periodic("log", config.log.every, log_step, at_stop=True)], {}
    if config.eval.every:
        keys = ["val_loss", "ema_val_loss"] if config.optim.ema_decay else ["val_loss"]
        work.append(Periodic("validation", config.eval.every, lambda s, _: validate(validation, s), keys=keys))
    if config.tasks:
        from torchtitan_lite.run.tasks import Tasks

        if tasks := Tasks.from_config(config, data):
            task_hashes = tasks.digests
            keys = [f"task/{name}" for name in task_hashes]
            work.append(Periodic("tasks", config.eval.tasks_every, lambda s, _: tasks.score(s), keys=keys))
    work.append(Periodic("save", config.checkpoint.every, lambda s, _: save(s), at_stop=True))
    if config.sample.every:
        from torchtitan_lite.run.sampling import Prompts, sample

        prompts = Prompts.from_config(config, data)
        work.append(Periodic("samples", config.sample.every, lambda s, _: sample(prompts, s), keys=["prompt"]))
    return work, task_hashes


def log_step(s: Session, record: StepRecord) -> None:
    """Record and log the step. Rates cover the time since the last line, without saves and validations.

    `loss` is the step's, which a replay compares. `mean_loss` is the mean per token since the last multiple of
    log.every. An extra line before a preemption does not split this interval, so a resume has the same mean.
    """
    state, steps, scaler, meter = s.state, s.config.train.steps, s.scaler, s.meter
    lap = meter.lap(state.tokens)
    if s.process.device.type == "cuda":
        lap.parts.pop("optimizer_s", None)  # the host only launches the kernels
    values: dict[str, Any] = {
        "step": state.step,
        "loss": finite(record.numbers.loss),  # may be non-finite in a skipped step
        "mean_loss": meter.mean_loss(),
        "grad_norm": finite(record.numbers.grad_norm),
        "lr": learning_rate(s.phase.optim, state.step, steps),
        "tokens": state.tokens,
        "tokens_per_second": lap.tokens / lap.seconds,
        "peak_memory_gib": peak_memory_gib(s.process.device),
        "seconds": lap.seconds,
        **lap.parts,
    }
    values |= {key: [finite(loss) for loss in losses] for key, losses in record.losses_of_ranks().items()}
    values |= {key: finite(norm) for key, norm in record.norms_of_blocks().items()}
    if scaler.enabled:
        values |= {"loss_scale": scaler.scale.item(), "skipped_steps": scaler.skipped_steps}
    if len(state.segments[-1]["sources"]) > 1:
        values["sources"] = seen_of_sources(state)
    lines = []
    for metric, summed in zip(s.metrics, record.metrics, strict=False):  # of a step that is due; not of a stop's
        numbers = {name: finite(value) for name, value in metric.values(summed).items()}
        values |= numbers
        if metric.line and None not in numbers.values():
            lines.append(metric.line.format_map(numbers))
    if meter.peak_tokens_per_second:
        values["mfu"] = values["tokens_per_second"] / meter.peak_tokens_per_second
    s.log.record(values)
    left_s = meter.seconds_per_step(state.step) * (steps - state.step)
    s.log.info(
        step_line(values, lines, steps, lap.parts["data_s"] / lap.seconds, left_s),
        functools.partial(fitted, metrics=lines),
    )
    if state.step % s.config.log.every == 0:
        meter.loss_since.zero_()


def finite(value: Any) -> Any:
    """Return None for a non-finite number, as JSON has no NaN or infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def validate(validation: Validation, s: Session) -> None:
    """Score the validation set; with optim.ema_decay, the average of the weights too. Collective."""
    step, before, device, log = s.state.step, time.perf_counter(), s.process.device, s.log
    score = evaluate(s.model, validation, device)
    seconds = time.perf_counter() - before
    log.record({"step": step, **score.record(), "eval_samples": validation.n_samples, "eval_s": seconds})
    best = s.process.rank == 0 and attempts.best_step(s.config.folder, range(1, step + 1)) == step
    log.info(eval_line(step, score, validation, seconds, best=best))
    if s.config.optim.ema_decay:
        record, line = evaluate_average(step, s.model, s.optimizer, validation, device)
        log.record(record)
        log.info(line)


def save(s: Session) -> None:
    """Save a checkpoint, after waiting for a previous background save.

    A synchronous save can take a minute, in which a signal may arrive: the ranks ask once, so that the run then ends
    with this checkpoint, instead of making two steps and saving again.

    Raises:
        NonFiniteError, ReplicaMismatchError: on every rank: this state must not be saved.
        SaveError: the last save of the run failed. Earlier failures are only logged.
    """
    state, ends = s.state, s.preemption.agreed or s.state.step == s.config.train.steps
    require_finite(s.model, state.step)
    require_equal_replicas(s.model, s.optimizer, state.step)
    report_save(s.checkpointer, s.log, wait=True, ends=ends)
    if remote := s.checkpointer.remote:
        remote.report(s.log, wait=True)
        on_rank0(remote.require_newest, s.process.untimed)
    state = replace(state, grad_scaler=s.scaler.state_dict(), loss_since=s.meter.loss_since.tolist())
    for guard in s.guards:
        state = replace(state, **guard.state())
    s.checkpointer.save(state)
    error = report_save(s.checkpointer, s.log, wait=ends or not s.config.checkpoint.async_save, ends=ends)
    if ends and error:
        raise SaveError(f"the last checkpoint was not saved: {error}. Older checkpoints are untouched")
    if not (ends or error or s.config.checkpoint.async_save):
        s.preemption.agree(s.process)


def report_save(checkpointer: Checkpointer, log: Log, *, wait: bool, ends: bool = False) -> str:
    """Log a save once it is committed or has failed, and its upload. Returns the error, and does not raise it.

    Args:
        ends: also wait for the upload.
    """
    saved = checkpointer.wait() if wait or checkpointer.finished() else None
    if saved and saved.error:
        then = "" if ends else ", training continues"
        log.info(f"NOT SAVED  step {saved.step}: {saved.error}; older checkpoints are untouched{then}")
    elif saved:
        paused = f", training paused for {saved.blocked_s:.1f} s" if checkpointer.config.async_save else ""
        log.record({"step": saved.step, "save_s": saved.blocked_s if paused else saved.seconds, "bytes": saved.bytes})
        where = ", on this machine only until it is uploaded" if checkpointer.remote else ""
        log.info(f"saved   {saved.folder}  ({saved.bytes / 2**20:.1f} MiB, {saved.seconds:.1f} s{paused}){where}")
    if saved and saved.note:
        log.info(f"note    older checkpoints were not deleted: {saved.note}")
    error = saved.error if saved else ""
    return error or (checkpointer.remote.report(log, wait=ends) if checkpointer.remote else "")
