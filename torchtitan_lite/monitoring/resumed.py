"""What the start of a resumed run logs: what changed since the checkpoint was saved."""

from collections.abc import Mapping
from typing import Any

from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.schema import Config


def resume_lines(config: Config, saved: TrainState, here: TrainState) -> list[str]:
    """Changed keys, why the resume is not bit for bit, and a change of the validation text."""
    lines = []
    if values := changed(saved, here):
        lines.append(f"run     changed since then: {values}")
    older = {"fast_paths": 1, "shared_memory_copies": False}  # of checkpoints that do not record them
    if values := differences(older | dict(saved.bitwise_setting), here.bitwise_setting):
        lines.append(f"run     the same data in the same order, but not bit for bit: {values}")
    if config.eval.every and (values := validation_change(saved, here)):
        lines.append(f"run     validation covers {values}: do not compare its loss with that of earlier steps")
    return lines


def changed(saved: TrainState, here: TrainState) -> str:
    """The changed config keys, as `differences` shows them, without those only read at step 0."""
    return differences(saved.config, {key: v for key, v in here.config.items() if key != "model.init_from"})


def validation_change(saved: TrainState, here: TrainState) -> str:
    """The sequences that validation covers now and covered before the resume; empty if they are the same.

    Older checkpoints do not record them: they validated on the first sequences of the text.
    """
    now, before, how = here.validation, saved.validation, ""
    if not before:
        before = {"samples": min(saved.config.get("eval.samples", 0), now["of"]), "of": now["of"]}
        how = "the first "
    if now == before or (now["samples"] == now["of"] and before["samples"] == before["of"]):
        return ""
    return f"{now['samples']} of {now['of']} sequences, drawn at random, and covered {how}{before['samples']} before"


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The changed values, as "threads 1 -> 2, ..."; empty if there are none."""
    return ", ".join(
        f"{key} {saved.get(key)} -> {value}" for key, value in here.items() if saved.get(key, value) != value
    )
