"""TensorBoard and Weights & Biases, in addition to metrics.jsonl. Each is an extra to install."""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.schema import LogConfig
from torchtitan_lite.terminal import print_error

Scalars = Mapping[str, float]
_SENT = "wandb-sent.txt"  # the last step that was sent with a delay


class Trackers:
    """Passes records on. A failing tracker is reported once, then dropped.

    Args:
        state: where the run starts; TensorBoard drops later records of an earlier attempt.
    """

    def __init__(self, config: LogConfig, folder: Path, state: TrainState) -> None:
        self._open: dict[str, tuple[Callable[[Scalars, int], None], Callable[[], None]]] = {}
        self._start = config, folder, state
        # Weights & Biases takes no step twice: what a rewind may still abandon waits for the next checkpoint
        self._delayed = {"wandb"} if state.config.get("spike.action") == "rewind" else set[str]()
        self._back = int(state.config.get("spike.rewind_steps", 0))
        self._waiting: list[tuple[str, int, Mapping[str, Any]]] = []
        self._saved: list[int] = []
        self._open_all(config.trackers)
        if self._delayed & {*self._open}:
            self._wait_again()

    def _open_all(self, names: Iterable[str]) -> None:
        config, folder, state = self._start
        for name in names:
            start = {"tensorboard": _tensorboard, "wandb": _wandb}[name]
            self._try(name, lambda: self._open.update({name: start(config, folder, state)}))  # noqa: B023  # called now

    def record(self, values: Mapping[str, Any]) -> None:
        """Log the numbers of a record of metrics.jsonl."""
        step = int(values["step"])
        for name in list(self._open):
            if name in self._delayed:
                self._waiting.append((name, step, values))
            else:
                self._write(name, step, values)
        self._saved += [step] if "save_s" in values else []
        newest = max([step, *(at for _, at, _ in self._waiting)])
        # a step after `newest` goes back to a checkpoint that is at least rewind_steps older
        self._send(max((saved for saved in self._saved if saved + self._back <= newest), default=-1))

    def _wait_again(self) -> None:
        """Take what an earlier attempt had not sent from metrics.jsonl."""
        _, folder, state = self._start
        file, sent = folder / "metrics.jsonl", folder / _SENT
        try:
            if state.step == 0:  # a stop before anything is sent loses nothing
                sent.write_text("0\n", encoding="utf-8")
            after = int(sent.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return  # none was sent with a delay
        for line in file.read_bytes().splitlines() if file.is_file() else []:
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                values = json.loads(line)
                if after < int(values["step"]) <= state.step:
                    self.record(values)

    def _write(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        if name in self._open:
            self._try(name, lambda: self._open[name][0](_scalars(values), step))

    def _send(self, last: float) -> None:
        """Log what waits, up to a step."""
        due = [item for item in self._waiting if item[1] <= last]
        for name, step, values in due:
            self._write(name, step, values)
        self._waiting = [item for item in self._waiting if item[1] > last]
        if due:
            with contextlib.suppress(OSError):  # the next attempt would send less or more
                (self._start[1] / _SENT).write_text(f"{due[-1][1]}\n", encoding="utf-8")

    def rewound(self, step: int) -> None:
        """Later steps will be repeated: a new TensorBoard file marks that at its start, as on a resume."""
        config, folder, state = self._start
        self._start = config, folder, replace(state, step=step)
        if "tensorboard" in self._open:
            self._try("tensorboard", self._open["tensorboard"][1])
            self._open.pop("tensorboard", None)
            self._open_all(["tensorboard"])
        self._waiting = [item for item in self._waiting if item[1] <= step]
        self._saved = [saved for saved in self._saved if saved <= step]

    def close(self) -> None:
        newest, steps = max((at for _, at, _ in self._waiting), default=0), self._start[2].config.get("train.steps", 0)
        if newest >= int(steps):  # a run that stopped earlier may go back when it resumes
            self._send(math.inf)
        for name, (_, close) in list(self._open.items()):
            self._try(name, close)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:  # any error: a tracker must not end a run
            self._open.pop(name, None)
            print_error(f"log.trackers: {name} failed: {error}; training continues without it")


def _scalars(values: Mapping[str, Any]) -> Scalars:
    # a record from metrics.jsonl has the time of writing
    return {key: float(v) for key, v in values.items() if key not in ("step", "time") and type(v) in (int, float)}


def grouped(key: str) -> str:
    """The name of a figure in Weights & Biases, which makes a section of each prefix: train, val, task or time."""
    if key.startswith("task/") or key in ("seconds", "tokens_per_second", "mfu") or key.endswith("_s"):
        return key if key.startswith("task/") else f"time/{key}"
    average, _, rest = key.rpartition("val_")  # ema_val_loss is val/ema_loss
    if key.startswith(("val_", "ema_val_")):
        return f"val/{average}{rest}"
    if key in ("unigram_bits_per_byte", "eval_samples"):
        return f"val/{key}"
    return key.replace("task_", "task/", 1) if key.startswith("task_") else f"train/{key}"


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

    kept = folder / "wandb-id.txt"  # a resume continues the same W&B run, with the names that it began with
    known, *names = (kept.read_text(encoding="utf-8").split() if kept.is_file() else []) or (None, "grouped")
    about = dict(state.config)
    run = wandb.init(
        project=config.wandb_project, name=folder.name, id=known, resume="allow", dir=str(folder), config=about
    )
    kept.write_text("\n".join([run.id, *names, ""]), encoding="utf-8")

    def write(scalars: Scalars, at: int) -> None:
        run.log({grouped(key) if names else key: value for key, value in scalars.items()}, step=at)

    return write, run.finish
