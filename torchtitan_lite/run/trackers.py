"""TensorBoard and Weights & Biases, in addition to metrics.jsonl. Each is an extra to install.

Records are sent at once. A resume sends the records of repeated steps again.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import LogConfig


class Tracker(NamedTuple):
    """An open tracker."""

    write: Callable[[Mapping[str, Any]], None]  # called with each record of metrics.jsonl, after it is in the file
    close: Callable[[], None]


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record, without its step and time."""
    return {key: float(v) for key, v in values.items() if key not in ("step", "time") and type(v) in (int, float)}


def tensorboard(config: LogConfig, folder: Path, state: TrainState) -> Tracker:
    """Open a new file, which drops an earlier attempt's records of later steps."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=state.step + 1)
    if state.step == 0:
        writer.add_text("config", "\n".join(f"    {key} = {value}" for key, value in state.config.items()))

    def write(values: Mapping[str, Any]) -> None:
        for key, value in scalars(values).items():
            writer.add_scalar(key, value, values["step"])

    return Tracker(write, writer.close)


def weights_and_biases(config: LogConfig, folder: Path, state: TrainState) -> Tracker:
    """Open the same W&B run in each attempt.

    Of a repeated step, W&B keeps the first record, which is equal bit for bit on the same world size.
    """
    import wandb

    file = folder / "wandb-id.txt"
    run = wandb.init(
        project=config.wandb_project,
        name=folder.name,
        id=(file.read_text(encoding="utf-8").strip() or None) if file.is_file() else None,
        resume="allow",
        dir=str(folder),
        config=dict(state.config),
    )
    file.write_text(f"{run.id}\n", encoding="utf-8")

    def write(values: Mapping[str, Any]) -> None:
        run.log({grouped(key): v for key, v in scalars(values).items()}, step=int(values["step"]))

    return Tracker(write, run.finish)


def grouped(key: str) -> str:
    """Return the W&B name of a figure. W&B groups by prefix: train, val, task or time."""
    if key.startswith("task/") or key in ("seconds", "tokens_per_second", "mfu") or key.endswith("_s"):
        return key if key.startswith("task/") else f"time/{key}"
    average, _, rest = key.rpartition("val_")  # ema_val_loss is val/ema_loss
    if key.startswith(("val_", "ema_val_")):
        return f"val/{average}{rest}"
    if key in ("unigram_bits_per_byte", "eval_samples"):
        return f"val/{key}"
    return key.replace("task_", "task/", 1) if key.startswith("task_") else f"train/{key}"
