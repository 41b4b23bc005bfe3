"""The start of a training attempt, up to its first step.

An attempt can fail for many reasons: wrong values, missing weights, a full disk. So `start` changes the run's folder
last: config, run.json, records of steps that will be repeated, checkpoints to set aside.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpointing.progress import on_rank0
from torchtitan_lite.checkpointing.select import set_aside
from torchtitan_lite.checkpointing.storage import find_steps
from torchtitan_lite.config.schema import Config, SpikeConfig
from torchtitan_lite.config.toml import Loaded, to_toml_with_origins
from torchtitan_lite.data.dataset import DataSet, prepare_all
from torchtitan_lite.data.token_files import PAIRS
from torchtitan_lite.distributed.agreement import require_agreement
from torchtitan_lite.distributed.process_group import World, from_rank0
from torchtitan_lite.errors import ConfigError, DataError
from torchtitan_lite.models import Transformer
from torchtitan_lite.monitoring import run_folder
from torchtitan_lite.monitoring.console import start_lines, what_next
from torchtitan_lite.monitoring.metrics import Log
from torchtitan_lite.terminal import print_line
from torchtitan_lite.training.session import Session


def prepared(loaded: Loaded) -> tuple[Loaded, DataSet]:
    """Prepare the data, and turn epochs into steps. Without a process group: collectives of others would time out."""
    data = prepare_all(loaded.config.data, loaded.config.tokenizer, print_line)
    if loaded.config.in_epochs or loaded.config.data.packing == "best_fit":
        from torchtitan_lite.training import epochs

        loaded = epochs.resolved(loaded, data, print_line)
    return loaded, data


def options(config: Config, data: DataSet, world: World) -> dict[str, Any]:
    """The parts of a session that only some runs have."""
    if not (config.sample.every or config.tasks or config.profile.steps or config.spike != SpikeConfig()):
        return {}
    from torchtitan_lite.training.options import build_options

    return build_options(config, data, world)


def start(
    loaded_config: Loaded, data: DataSet, world: World, log: Log, build: Callable[..., Session]
) -> Session | None:
    """Build the session and prepare the run's folder. None if the run is complete.

    Args:
        build: `train.build`.

    Raises:
        UserError: on every rank. Only the status in run.json has changed.
    """
    config = loaded_config.config
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
    s = build(config, data, world, log, resume)
    if s.tasks is not None:
        s.state = replace(s.state, tasks={**s.state.tasks, **s.tasks.digests})
    with contextlib.ExitStack() as refused:
        refused.callback(s.close)
        if s.loaded and not loaded_config.with_changes:
            from torchtitan_lite.monitoring.resumed import require_same_learning

            # another run's checkpoint, which checkpoint.resume names, may be continued in another way
            if on_rank0(world, lambda: s.state.step in find_steps(s.checkpointer.folder)):
                require_same_learning(config, s.loaded, s.state)
        log.info(start_lines(config, s.layout, world, s.model, data, s.samples, s.state, s.loaded))
        if config.model.init_from and not s.loaded and world.rank == 0:
            from torchtitan_lite.huggingface.weights import tokenizer_notes

            for note in tokenizer_notes(Path(config.model.init_from), data.folder / "tokenizer.json"):
                log.info(f"note    {note}")
        step = s.state.step
        if step < config.train.steps:
            with s.watchdog.loading("comparing the space on the disk"):
                s.checkpointer.require_space()
        facts = run_folder.facts(s.layout, world, machines, sys.argv)
        facts |= {"steps": config.train.steps, "config_files": list(loaded_config.files)}
        facts["setting"] = dict(s.state.bitwise_setting)  # for a replay

        def take_over() -> list[str]:
            later, changes = _records(config, s)
            if step >= config.train.steps and (s.checkpointer.aside or not later):
                return []  # finished; later records are those of a longer run that was killed before it saved
            files = {
                "config.toml": to_toml_with_origins(loaded_config).encode(),
                **{n: (data.folder / n).read_bytes() for n in ("tokenizer.json", PAIRS) if (data.folder / n).is_file()},
                "run.json": run_folder.accepted(config.folder, step, resume, facts),
            }
            saves, files = s.checkpointer, files | later | changes
            return run_folder.take_over(config.folder, files, lambda: set_aside(saves.folder, saves.aside))

        with s.watchdog.loading("changing the files of the run"):
            for note in on_rank0(world, take_over):
                log.info(f"note    {note}")
        if s.tasks is not None:
            s.tasks.score_missing(s)
        if step >= config.train.steps:
            log.info(f"finished: step {step} of train.steps = {config.train.steps}; {what_next(config, step)}")
            run_folder.write_status(config.folder, world, "complete", None if s.checkpointer.aside else step)
            return None  # if later checkpoints would be set aside, the run has got further than this step
        refused.pop_all()
    return s


def _records(config: Config, s: Session) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """New contents of files without records of later steps, and of changes.jsonl, by name."""
    if not s.loaded and not any(config.folder.glob("*.jsonl")):
        return {}, {}
    from torchtitan_lite.monitoring.resumed import recorded_changes, without_later

    later = without_later(config.folder, s.state.step)
    return later, recorded_changes(config.folder / "changes.jsonl", s.loaded, s.state)


def peak_tokens_per_second(config: Config, model: Transformer, world: World) -> float:
    """Tokens per second at the nominal peak of all devices, for MFU; 0 if it is unknown, as for rows of any length."""
    if world.device.type != "cuda" or config.data.objective == "pairs":
        return 0.0
    from torchtitan_lite.monitoring.mfu import flops_per_token, peak_flops

    return peak_flops(config, world) / flops_per_token(model, config.input_len, config.target_len)


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
