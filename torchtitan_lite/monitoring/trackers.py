"""TensorBoard and Weights & Biases, for whoever wants them beside metrics.jsonl. Each is an extra to be installed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.schema import LogConfig
from torchtitan_lite.terminal import print_error

Scalars = Mapping[str, float]


class Trackers:
    """Hands records on. A tracker that fails is said once, and training goes on without it.

    Args:
        folder: the run's.
        state: where the run begins; later records of an earlier attempt are dropped where possible.
    """

    def __init__(self, config: LogConfig, folder: Path, state: TrainState) -> None:
        self._open: dict[str, tuple[Callable[[Scalars, int], None], Callable[[], None]]] = {}
        for name in config.trackers:
            start = {"tensorboard": _tensorboard, "wandb": _wandb}[name]
            self._try(name, lambda: self._open.update({name: start(config, folder, state)}))  # noqa: B023  # called now

    def record(self, values: Mapping[str, Any]) -> None:
        """The numbers of a record of metrics.jsonl."""
        for name, (write, _) in list(self._open.items()):
            self._try(name, lambda: write(_scalars(values), int(values["step"])))  # noqa: B023  # called now

    def close(self) -> None:
        """Have everything written."""
        for name, (_, close) in list(self._open.items()):
            self._try(name, close)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:  # whatever it is: a tracker must not end weeks of training
            self._open.pop(name, None)
            print_error(f"log.trackers: {name} failed: {error}; training goes on without it")


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

    kept = folder / "wandb-id.txt"  # the same run at every resume
    known = kept.read_text(encoding="utf-8").strip() if kept.is_file() else None
    about = dict(state.config)
    run = wandb.init(
        project=config.wandb_project, name=folder.name, id=known, resume="allow", dir=str(folder), config=about
    )
    kept.write_text(run.id + "\n", encoding="utf-8")
    return (lambda scalars, at: run.log(dict(scalars), step=at)), run.finish
