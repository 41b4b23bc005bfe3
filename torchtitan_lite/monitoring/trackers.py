"""TensorBoard and Weights & Biases, in addition to metrics.jsonl. Each is an extra to install."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.schema import LogConfig
from torchtitan_lite.terminal import print_error

Scalars = Mapping[str, float]


class Trackers:
    """Passes records on. A failing tracker is reported once, then dropped.

    Args:
        state: where the run starts; TensorBoard drops later records of an earlier attempt.
    """

    def __init__(self, config: LogConfig, folder: Path, state: TrainState) -> None:
        self._open: dict[str, tuple[Callable[[Scalars, int], None], Callable[[], None]]] = {}
        for name in config.trackers:
            start = {"tensorboard": _tensorboard, "wandb": _wandb}[name]
            self._try(name, lambda: self._open.update({name: start(config, folder, state)}))  # noqa: B023  # called now

    def record(self, values: Mapping[str, Any]) -> None:
        """Log the numbers of a record of metrics.jsonl."""
        for name, (write, _) in list(self._open.items()):
            self._try(name, lambda: write(_scalars(values), int(values["step"])))  # noqa: B023  # called now

    def close(self) -> None:
        for name, (_, close) in list(self._open.items()):
            self._try(name, close)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:  # any error: a tracker must not end a run
            self._open.pop(name, None)
            print_error(f"log.trackers: {name} failed: {error}; training continues without it")


def _scalars(values: Mapping[str, Any]) -> Scalars:
    return {key: float(v) for key, v in values.items() if key != "step" and type(v) in (int, float)}


def _tensorboard(
    config: LogConfig, folder: Path, state: TrainState
) -> tuple[Callable[[Scalars, int], None], Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=state.step + 1)
    if state.step == 0:
        writer.add_text("config", "\n".join(f"    {key} = {value}" for key, value in state.config.items()))

    def write(scalars: Scalars, at: int) -> None:
        for key, value in scalars.items():
            writer.add_scalar(key, value, at)

    return write, writer.close


def _wandb(
    config: LogConfig, folder: Path, state: TrainState
) -> tuple[Callable[[Scalars, int], None], Callable[[], None]]:
    import wandb

    kept = folder / "wandb-id.txt"  # a resume continues the same W&B run
    known = kept.read_text(encoding="utf-8").strip() if kept.is_file() else None
    about = dict(state.config)
    run = wandb.init(
        project=config.wandb_project, name=folder.name, id=known, resume="allow", dir=str(folder), config=about
    )
    kept.write_text(run.id + "\n", encoding="utf-8")
    return (lambda scalars, at: run.log(dict(scalars), step=at)), run.finish
