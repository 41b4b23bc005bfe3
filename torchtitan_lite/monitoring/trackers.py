"""TensorBoard and Weights & Biases, in addition to metrics.jsonl. Each is an extra to install.

Trackers know nothing of rewinds: after one, they are closed and opened again, as on a resume.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import LogConfig
from torchtitan_lite.monitoring.records import parse
from torchtitan_lite.terminal import print_error


class Tracker(NamedTuple):
    """An open tracker."""

    write: Callable[[Mapping[str, Any]], None]  # called with each record of metrics.jsonl, after it is in the file
    close: Callable[[], None]


class Trackers:
    """Passes records on. A failing tracker is reported once, then dropped.

    Args:
        state: where the run starts, resumes, or has gone back to.
    """

    def __init__(self, config: LogConfig, folder: Path, state: TrainState) -> None:
        self._config, self._folder = config, folder
        self._open: dict[str, Tracker] = {}
        self._open_all(config.trackers, state)

    def _open_all(self, names: Iterable[str], state: TrainState) -> None:
        for name in names:
            with self._reported(name):
                self._open[name] = TRACKERS[name](self._config, self._folder, state)

    def record(self, values: Mapping[str, Any]) -> None:
        """Log the numbers of a record of metrics.jsonl."""
        for name, tracker in list(self._open.items()):
            with self._reported(name):
                tracker.write(values)

    def reopen(self, state: TrainState) -> None:
        """The run has gone back to this state, and metrics.jsonl has no later records."""
        self.close()
        self._open_all(list(self._open), state)

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            with self._reported(name):
                tracker.close()

    @contextlib.contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # any error: a tracker must not end a run
            self._open.pop(name, None)
            print_error(f"log.trackers: {name} failed: {error}; training continues without it")


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, without its step and the time at which it was written."""
    return {key: float(v) for key, v in values.items() if key not in ("step", "time") and type(v) in (int, float)}


def _tensorboard(config: LogConfig, folder: Path, state: TrainState) -> Tracker:
    """A new file, which drops the records of later steps that an earlier attempt or a rewind has left."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=state.step + 1)
    if state.step == 0:
        writer.add_text("config", "\n".join(f"    {key} = {value}" for key, value in state.config.items()))

    def write(values: Mapping[str, Any]) -> None:
        for key, value in _scalars(values).items():
            writer.add_scalar(key, value, values["step"])

    return Tracker(write, writer.close)


def _wandb(config: LogConfig, folder: Path, state: TrainState) -> Tracker:
    """The same W&B run in each attempt."""
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
        run.log({grouped(key): v for key, v in _scalars(values).items()}, step=int(values["step"]))

    sender = OnceSender(folder, "wandb", state, write)

    def close() -> None:
        sender.close()
        run.finish()

    return Tracker(sender.record, close)


TRACKERS: Mapping[str, Callable[[LogConfig, Path, TrainState], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


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


class OnceSender:
    """For a tracker that takes no step back: sends a record when no rewind can abandon it any more.

    A rewind goes back to a checkpoint that is at least spike.rewind_steps older than its spike. So the steps up to a
    checkpoint are final when the run is spike.rewind_steps further, and all are when the run is complete. They are
    read from metrics.jsonl, also those that a stopped attempt had not sent. Without rewinds, records are sent at once.
    """

    def __init__(self, folder: Path, name: str, state: TrainState, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._records, self._memory, self._send = folder / "metrics.jsonl", folder / f"{name}-sent.txt", send
        self._rewinds = state.config.get("spike.action") == "rewind"
        self._rewind_steps = int(state.config.get("spike.rewind_steps", 0))
        self._steps = int(state.config.get("train.steps", 0))
        self._position = 0  # in metrics.jsonl; the records before it were sent
        self._newest, self._saved = state.step, list[int]()  # the checkpoints after the last step that was sent
        self._sent = state.step  # unless an earlier attempt has waited
        with contextlib.suppress(OSError, ValueError):
            self._sent = int(self._memory.read_text(encoding="utf-8")) if state.step else 0
        if self._rewinds:
            self._remember()
            for record in self._unsent():
                self._note(record)
            self._send_final()
        elif self._memory.exists():
            self._send_up_to(math.inf)
            with contextlib.suppress(OSError):
                self._memory.unlink()

    def record(self, values: Mapping[str, Any]) -> None:
        """Call this with each record, after it is in metrics.jsonl."""
        if not self._rewinds:
            self._send(values)
            return
        self._note(values)
        self._send_final()

    def close(self) -> None:
        """Send the rest if the run is complete. One that stopped earlier may rewind when it resumes."""
        if self._rewinds and any(record["step"] >= self._steps for record in self._unsent()):
            self._send_up_to(math.inf)

    def _note(self, record: Mapping[str, Any]) -> None:
        self._newest = max(self._newest, record["step"])
        if "save_s" in record:
            self._saved.append(record["step"])

    def _send_final(self) -> None:
        final = max((step for step in self._saved if step + self._rewind_steps <= self._newest), default=0)
        if final > self._sent:
            self._send_up_to(final)
            self._saved = [step for step in self._saved if step > final]

    def _unsent(self) -> list[dict[str, Any]]:
        return [record for line in self._lines() if (record := parse(line))]

    def _lines(self) -> list[bytes]:
        """The lines of metrics.jsonl from `_position` on."""
        with contextlib.suppress(OSError), self._records.open("rb") as file:  # they may be readable later
            file.seek(self._position)
            return file.readlines()
        return []

    def _send_up_to(self, last: float) -> None:
        position, sent, waiting = self._position, self._sent, list[int]()
        for line in self._lines():
            record = parse(line)
            if record and record["step"] > last:
                waiting.append(position)
            elif record and record["step"] > sent:
                self._send(record)
                self._sent = max(self._sent, record["step"])
            position += len(line)
        self._position = waiting[0] if waiting else position
        self._remember()

    def _remember(self) -> None:
        with contextlib.suppress(OSError):  # the next attempt may send less, or some steps again
            self._memory.write_text(f"{self._sent}\n", encoding="utf-8")
