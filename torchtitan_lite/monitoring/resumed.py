"""What has changed since the checkpoint that a run resumes from: what is refused, and what is logged."""

import shlex
from collections.abc import Mapping
from typing import Any

from torchtitan_lite.checkpointing.compatibility import is_learned_with
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import format_value
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.terminal import counted


def require_same_learning(config: Config, saved: TrainState, current: TrainState) -> None:
    """Check that a resume would learn with the values of the run so far.

    Raises:
        ConfigError: it would not; the message names each value, and `--resume-with-changes`.
    """
    before, now = (list(state.config["data.sources"]) for state in (saved, current))
    if before != now and sorted(before) == sorted(now):
        raise ConfigError(
            f"data.sources: the order decides which sample comes when, and this run has {before}, not {now}"
        )
    values = current.config.items()
    changes = {key: (saved.config[key], value) for key, value in values if saved.config[key] != value}
    learned = {k: pair for k, pair in changes.items() if is_learned_with(k) and (pair[1] or k != "model.init_from")}
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


def resume_lines(config: Config, saved: TrainState, current: TrainState) -> list[str]:
    """Changed keys, why the resume is not bit for bit, and changes of the validation text and of tasks."""
    lines = []
    shown = {key: value for key, value in current.config.items() if key != "model.init_from"}  # only read at step 0
    if values := differences(saved.config, shown):
        lines.append(f"run     changed since then: {values}")
    if values := differences(saved.bitwise_setting, current.bitwise_setting):
        lines.append(f"run     the same data in the same order, but not bit for bit: {values}")
    if config.eval.every and (values := validation_change(saved.validation, current.validation)):
        lines.append(f"run     validation covers {values}: do not compare its loss with that of earlier steps")
    for name, digest in current.tasks.items():
        if saved.tasks.get(name, digest) != digest:
            other = f"eval.tasks {name} has other questions"
            lines.append(f"run     {other}: do not compare its scores with those of earlier steps")
    return lines


def validation_change(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """The sequences that validation covers now and covered before the resume; empty if they are the same.

    Args:
        before, now: of TrainState.
    """
    if now == before or (now["samples"] == now["of"] and before["samples"] == before["of"]):
        return ""
    return f"{now['samples']} of {now['of']} sequences, drawn at random, and covered {before['samples']} before"


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """The changed values, as "threads 1 -> 2, ..."; empty if there are none."""
    return ", ".join(
        f"{key} {saved.get(key)} -> {value}" for key, value in current.items() if saved.get(key, value) != value
    )
