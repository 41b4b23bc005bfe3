"""Describes for the log what has changed since the checkpoint that a run resumes from."""

from collections.abc import Mapping
from typing import Any

from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import Config
from torchtitan_lite.run.phases import place_lines


def resume_lines(config: Config, saved: TrainState, current: TrainState) -> list[str]:
    """List changed keys, why the resume is not bit for bit, and changes of validation text and tasks."""
    lines = []
    shown = {key: value for key, value in current.settings.items() if key != "model.init_from"}  # only read at step 0
    if values := changed_values(saved.settings, shown):
        lines.append(f"run     changed since then: {values}")
    if len(current.segments) > max(len(saved.segments), 1):
        lines += place_lines(current)
    if values := changed_values(saved.bitwise_setting, current.bitwise_setting):
        lines.append(f"run     the same data in the same order, but not bit for bit: {values}")
    if config.eval.every and (values := validation_change(saved.validation, current.validation)):
        lines.append(f"run     validation covers {values}: do not compare its loss with that of earlier steps")
    for name, digest in current.tasks.items():
        if saved.tasks.get(name, digest) != digest:
            changed = f"eval.tasks {name} has different questions"
            lines.append(f"run     {changed}: do not compare its scores with those of earlier steps")
    return lines


def validation_change(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """Describe which sequences validation covers now and before the resume; empty if they are the same.

    Args:
        before, now: TrainState.validation.
    """
    if now == before or (now["samples"] == now["of"] and before["samples"] == before["of"]):
        return ""
    return f"{now['samples']} of {now['of']} sequences, drawn at random, and covered {before['samples']} before"


def changed_values(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """List the changed values, as "threads 1 -> 2, ..."; empty if there are none."""
    return ", ".join(
        f"{key} {saved.get(key)} -> {value}" for key, value in current.items() if saved.get(key, value) != value
    )
