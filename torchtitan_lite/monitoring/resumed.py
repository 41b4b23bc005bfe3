"""What has changed since the checkpoint that a run resumes from: what is refused, and what is logged."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from torchtitan_lite.checkpointing.compatibility import is_learned_with
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config, default_of, known_keys
from torchtitan_lite.config.toml import format_value
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.terminal import counted


def require_same_learning(config: Config, saved: TrainState, current: TrainState) -> None:
    """Check that a resume would learn with the values of the run so far.

    Raises:
        ConfigError: it would not; the message names each value, and `--resume-with-changes`.
    """
    before, now = (list(state.config.get("data.sources") or ()) for state in (saved, current))
    if before != now and sorted(before) == sorted(now):
        raise ConfigError(
            f"data.sources: the order decides which sample comes when, and this run has {before}, not {now}"
        )
    changes = {key: pair for key, pair in _changes(saved, current).items() if is_learned_with(key)}
    learned = {key: pair for key, pair in changes.items() if pair[1] or key != "model.init_from"}
    if not learned:
        return
    back = shlex.join(f"--{key}={format_value(before)}" for key, (before, _) in learned.items())
    lines = [f"{config.folder} has made {counted(saved.step, 'step')} with other values than this command has:"]
    lines += [f"{k} = {format_value(before)} so far, {format_value(now)} here" for k, (before, now) in learned.items()]
    if "model.init_from" in learned:
        lines.append("(model.init_from is read only at step 0, so it would have no effect)")
    lines.append("start another run with --run.name=NEW")
    lines.append(f"or continue this one with its own values: {back}")
    lines.append(f"or continue it with the new ones from step {saved.step + 1} on: --resume-with-changes")
    raise ConfigError("\n  ".join(lines))


def _changes(saved: TrainState, current: TrainState) -> dict[str, tuple[Any, Any]]:
    """The values before and now of each changed key. A key that is newer than the checkpoint had its default."""
    known = known_keys()
    before = saved.config
    if before.get("optim.name") == "muon":  # version 0.2 had it, without this factor
        before = {"optim.muon_embedding_lr_factor": 1.0, **before}
    pairs = {key: (before.get(key, default_of(key)), now) for key, now in current.config.items() if key in known}
    plain = {key: tuple(json.loads(json.dumps(value)) for value in pair) for key, pair in pairs.items()}
    return {key: (before, now) for key, (before, now) in plain.items() if saved.config and before != now}


def _changed_tasks(saved: TrainState, current: TrainState) -> dict[str, tuple[Any, Any]]:
    """The hashes before and now of each task with other questions. Older checkpoints do not record them."""
    pairs = {name: (saved.tasks.get(name, now)[:12], now[:12]) for name, now in current.tasks.items()}
    return {f"eval.tasks {name}": (before, now) for name, (before, now) in pairs.items() if before != now}


def resume_lines(config: Config, saved: TrainState, current: TrainState) -> list[str]:
    """Changed keys, why the resume is not bit for bit, and changes of the validation text and of tasks."""
    lines = []
    if values := changed(saved, current):
        lines.append(f"run     changed since then: {values}")
    # checkpoints of older versions do not record these
    older = {"fast_paths": 1, "shared_memory_copies": False, "blocks_per_group": 1, "shard_columns": [], "tf32": False}
    older |= {"float8": False}
    if values := differences(older | dict(saved.bitwise_setting), current.bitwise_setting):
        lines.append(f"run     the same data in the same order, but not bit for bit: {values}")
    if config.eval.every and (values := validation_change(saved, current)):
        lines.append(f"run     validation covers {values}: do not compare its loss with that of earlier steps")
    for key in _changed_tasks(saved, current):
        lines.append(f"run     {key} has other questions: do not compare its scores with those of earlier steps")
    return lines


def changed(saved: TrainState, current: TrainState) -> str:
    """The changed config keys, as `differences` shows them, without those only read at step 0."""
    return differences(saved.config, {key: v for key, v in current.config.items() if key != "model.init_from"})


def validation_change(saved: TrainState, current: TrainState) -> str:
    """The sequences that validation covers now and covered before the resume; empty if they are the same.

    Older checkpoints do not record them: they validated on the first sequences of the text.
    """
    now, before, how = current.validation, saved.validation, ""
    if not before:
        before = {"samples": min(saved.config.get("eval.samples", 0), now["of"]), "of": now["of"]}
        how = "the first "
    if now == before or (now["samples"] == now["of"] and before["samples"] == before["of"]):
        return ""
    return f"{now['samples']} of {now['of']} sequences, drawn at random, and covered {how}{before['samples']} before"


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """The changed values, as "threads 1 -> 2, ..."; empty if there are none."""
    return ", ".join(
        f"{key} {saved.get(key)} -> {value}" for key, value in current.items() if saved.get(key, value) != value
    )
