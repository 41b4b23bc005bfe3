"""The work between steps: log, validate, score tasks, save, sample. `train` in train.py says when each is due."""

import math
import time
from typing import Any

from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.optim.optimizer import learning_rate
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run import attempts
from torchtitan_lite.run.console import seen_of_sources, step_line
from torchtitan_lite.run.out_of_memory import peak_memory_gib
from torchtitan_lite.run.saving import save
from torchtitan_lite.run.session import Periodic, Session
from torchtitan_lite.scoring.validation import Validation, eval_line, evaluate, evaluate_average


def build_periodic_work(config: Config, data: DataSet, process: Process) -> tuple[list[Periodic], dict[str, Any]]:
    """Build what the config asks for, in the order in which it runs after a step. Collective.

    Returns:
        the work; and what is evaluated, for `fresh_state`.

    Raises:
        UserError: an evaluation does not suit the run.
    """
    validation = Validation.from_config(config, data, config.train.micro_batch_size, process.rank, process.world_size)
    evaluated: dict[str, Any] = {"validation": validation.description(), "tasks": {}}
    work = [Periodic("log", config.log.every, log_step, at_stop=True)]
    if config.eval.every:
        keys = ["val_loss", "ema_val_loss"] if config.optim.ema_decay else ["val_loss"]
        work.append(Periodic("validation", config.eval.every, lambda s, _: validate(validation, s), keys=keys))
    if config.tasks:
        from torchtitan_lite.run.tasks import Tasks

        if tasks := Tasks.from_config(config, data):
            evaluated["tasks"] = tasks.digests
            keys = [f"task/{name}" for name in tasks.digests]
            work.append(Periodic("tasks", config.eval.tasks_every, lambda s, _: tasks.score(s), keys=keys))
    work.append(Periodic("save", config.checkpoint.every, lambda s, _: save(s), at_stop=True))
    if config.sample.every:
        from torchtitan_lite.run.sampling import Prompts, sample

        prompts = Prompts.from_config(config, data)
        work.append(Periodic("samples", config.sample.every, lambda s, _: sample(prompts, s), keys=["prompt"]))
    return work, evaluated


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
        **{key: [finite(loss) for loss in losses] for key, losses in record.losses_of_ranks().items()},
        **{key: finite(norm) for key, norm in record.norms_of_blocks().items()},
    }
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
    left_s = (time.perf_counter() - meter.started) / (state.step - meter.first_step) * (steps - state.step)
    s.log.info(step_line(values, lines, steps, lap.parts["data_s"] / lap.seconds, left_s), cut=True)
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
