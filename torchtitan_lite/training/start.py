"""The start and the end of a training attempt.

An attempt can fail for many reasons: wrong values, missing weights, a full disk. So `take_over` changes the run's
folder last: config, run.json, records of steps that will be repeated, checkpoints to set aside.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.checkpointing.progress import on_rank0
from torchtitan_lite.checkpointing.select import set_aside
from torchtitan_lite.checkpointing.storage import find_steps
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.config.toml import Loaded, format_value, to_toml_with_origins
from torchtitan_lite.data.dataset import DataSet, prepare_all
from torchtitan_lite.data.token_files import PAIRS
from torchtitan_lite.distributed.agreement import from_rank0, require_agreement
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import ConfigError, DataError, StuckError, UserError
from torchtitan_lite.monitoring import goodput, run_folder
from torchtitan_lite.monitoring.console import source_lines, start_lines, what_next
from torchtitan_lite.monitoring.metrics import Log
from torchtitan_lite.terminal import counted, duration, print_line
from torchtitan_lite.training.preemption import launcher_note
from torchtitan_lite.training.session import Session, report_save


@dataclass(frozen=True)
class Attempt:
    """This attempt at the run."""

    resume: str  # overrides checkpoint.resume, which is obeyed once per launch
    machines: list[str]


def prepared(loaded: Loaded) -> tuple[Loaded, DataSet]:
    """Prepare the data, and turn epochs into steps. Without a process group: collectives of others would time out."""
    data = prepare_all(loaded.config.data, loaded.config.tokenizer, print_line)
    if loaded.config.in_epochs or loaded.config.data.packing == "best_fit":
        from torchtitan_lite.training import epochs

        loaded = epochs.resolved(loaded, data, print_line)
    return loaded, data


def begin(config: Config, data: DataSet, world: World, log: Log) -> Attempt:
    """Announce the attempt in run.json, and check that all ranks mean the same run.

    Raises:
        UserError: on every rank. Only the status in run.json has changed.
    """
    machines_and_why = os.environ.get("TORCHTITAN_LITE_WORLD", "")  # from tools/elastic/machine.py
    resume = run_folder.begin(config.folder, world, config.checkpoint.resume)
    if resume != config.checkpoint.resume:
        done = f'checkpoint.resume = "{config.checkpoint.resume}" was applied by an earlier attempt of this launch'
        again = "; a new secret begins another launch" if machines_and_why else ""
        log.info(f"note    {done}: this attempt resumes from the newest checkpoint saved since{again}")
    if machines_and_why:
        log.info(f"start   {machines_and_why}")
    machines = require_agreement(config, world)
    require_same_data(config, data, world)
    return Attempt(resume, machines)


def require_same_data(config: Config, data: DataSet, world: World) -> None:
    """Check this rank's data.

    Raises:
        DataError: it differs from rank 0's.
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    if from_rank0(data.identity()) != data.identity():
        raise DataError(
            f"rank {world.rank} prepared different data than rank 0: is data.path the same text on every machine?"
        )
    if 0 < config.model.vocab_size < data.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the tokenizer's {data.vocab_size} entries; "
            "model.vocab_size = 0 takes the tokenizer's"
        )


def take_over(attempt: Attempt, loaded_config: Loaded, data: DataSet, s: Session) -> bool:
    """Log the start, and change the run's folder to that of this attempt. Returns whether there are steps to train.

    Raises:
        UserError: on every rank. Only the status in run.json has changed.
    """
    config, world, log, step = s.config, s.world, s.log, s.state.step
    layout = derive(config, world.world_size)
    finished = step >= config.train.steps
    if s.resumed and not loaded_config.with_changes:
        from torchtitan_lite.monitoring.resumed import require_same_learning

        # another run's checkpoint, which checkpoint.resume names, may be continued in another way
        if on_rank0(world, lambda: step in find_steps(s.checkpointer.folder)):
            require_same_learning(config, s.resumed, s.state)
    log.info(start_lines(config, layout, world, s.model, data, s.samples, s.state, s.resumed))
    if s.resumed and loaded_config.kept:
        values = flatten(config)
        kept = ", ".join(f"{key} = {format_value(values[key])}" for key in loaded_config.kept)
        log.info(f"resume  {kept}: the run's own, not given by this command; today's defaults differ")
    if config.model.init_from and not s.resumed and world.rank == 0:
        from torchtitan_lite.huggingface.weights import tokenizer_notes

        for note in tokenizer_notes(Path(config.model.init_from), data.folder / "tokenizer.json"):
            log.info(f"note    {note}")
    if not finished:
        with s.watchdog.loading("comparing the space on the disk"):
            s.checkpointer.require_space(step)
    facts = run_folder.facts(layout, world, attempt.machines, sys.argv)
    facts |= {"steps": config.train.steps, "config_files": list(loaded_config.files)}
    facts["setting"] = dict(s.state.bitwise_setting)  # for a replay

    def change_folder() -> list[str]:
        if attempt.resume != "never":
            log.clock.continue_run(config.folder, run_folder.read(config.folder), step)  # before later records go
        later, changes = _records(config, s)
        if finished and (s.checkpointer.aside or not later):
            return []  # finished; later records are those of a longer run that was killed before it saved
        files = {
            "config.toml": to_toml_with_origins(loaded_config).encode(),
            **{n: (data.folder / n).read_bytes() for n in ("tokenizer.json", PAIRS) if (data.folder / n).is_file()},
            "run.json": run_folder.accepted(
                config.folder, step, attempt.resume, facts | goodput.of_run(log.clock.spent())
            ),
        }
        saves, files = s.checkpointer, files | later | changes
        return run_folder.take_over(config.folder, files, lambda: set_aside(saves.folder, saves.aside))

    with s.watchdog.loading("changing the files of the run"):
        for note in on_rank0(world, change_folder):
            log.info(f"note    {note}")
    for callback in s.callbacks:
        if callback.resume:
            with log.clock.on(callback.kind):
                callback.resume(s)
    if finished:
        log.info(f"finished: step {step} of train.steps = {config.train.steps}; {what_next(config)}")
        # if later checkpoints would be set aside, the run has got further than this step
        run_folder.write_status(config.folder, world, "complete", None if s.checkpointer.aside else step)
    s.meter.begin()
    return not finished


def _records(config: Config, s: Session) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """New contents of files without records of later steps, and of changes.jsonl, by name."""
    if not s.resumed and not any(config.folder.glob("*.jsonl")):
        return {}, {}
    from torchtitan_lite.monitoring.records import without_later
    from torchtitan_lite.monitoring.resumed import recorded_changes

    later = without_later(config.folder, s.state.step)
    return later, recorded_changes(config.folder / "changes.jsonl", s.resumed, s.state)


def report_end(s: Session) -> None:
    """Log whether the run completed or was preempted, and write it to run.json."""
    config, step = s.config, s.state.step
    if step < config.train.steps:
        why = s.preemption.reason or "another rank was asked to"
        then = f"the same command resumes from there{launcher_note(why)}"
        s.log.info(f"stopped after step {step} of {config.train.steps} ({why}); {then}")
        run_folder.write_status(config.folder, s.world, "preempted", step, why, s.log.clock.spent())
        return
    spent = s.log.clock.spent()
    run_folder.write_status(config.folder, s.world, "complete", step, spent=spent)
    for line in source_lines(s.samples, s.state, config.data.skip_samples):
        s.log.info(line)
    seconds = time.perf_counter() - s.meter.started
    n_steps = counted(step - s.meter.first_step, "step")
    s.log.info(f"done    {n_steps} in {duration(seconds)}, {goodput.line(spent)}; {what_next(config)}")


def report_failure(config: Config, world: World, log: Log, error: Exception, s: Session | None) -> None:
    """Write a failure to run.json. Without a session, the attempt has failed before it could train."""
    if s is not None and isinstance(error, UserError) and not isinstance(error, StuckError):
        report_save(s, wait=True)  # every rank has raised this error, so a background save can still complete
    step = None if s is None else s.state.step
    spent = None if s is None else log.clock.spent()
    run_folder.write_status(config.folder, world, "failed", step, str(error) or repr(error), spent)
