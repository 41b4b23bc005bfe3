"""The log of a run: lines on the terminal and in train.log, records in metrics.jsonl. Only rank 0 writes."""

import json
import pkgutil
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import LogConfig
from torchtitan_lite.config.sections.log import TRACKERS
from torchtitan_lite.files import append_line
from torchtitan_lite.terminal import print_error

if TYPE_CHECKING:  # loaded only if the config asks for them
    from torchtitan_lite.run.trackers import Tracker


class Lap(NamedTuple):
    """Measurements since the last lap."""

    seconds: float
    parts: dict[str, float]  # seconds by named part of a step
    tokens: int


class Meter:
    """Measures training time without saves and validations, tokens, and the mean loss.

    Args:
        state: where the run starts or resumes.
        peak_tokens_per_second: of all devices, for MFU; 0: unknown.
    """

    def __init__(self, state: TrainState, device: torch.device, peak_tokens_per_second: float = 0.0) -> None:
        self.peak_tokens_per_second = peak_tokens_per_second
        self.started = self._lap_started = time.perf_counter()
        self.first_step, self._tokens = state.step, state.tokens
        self.parts: dict[str, float] = {}
        # (2,) float64: all ranks' summed loss and its tokens, since the last multiple of log.every
        self.loss_since = torch.tensor(state.loss_since, dtype=torch.float64, device=device)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in this context as training."""
        before = time.perf_counter()
        yield
        self._lap_started += time.perf_counter() - before

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Count the time in this context as a named part of training."""
        before = time.perf_counter()
        yield
        self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - before

    def lap(self, tokens: int) -> Lap:
        """End a lap; `tokens` is the total that the run has trained on."""
        now = time.perf_counter()
        lap = Lap(now - self._lap_started, self.parts, tokens - self._tokens)
        self._lap_started, self.parts, self._tokens = now, {}, tokens
        return lap

    def add_loss(self, total: Tensor, targets: int) -> None:
        """Add the summed loss of a step, () float64, without waiting. Ignores a non-finite loss."""
        sums = torch.stack([total, torch.full_like(total, targets)])
        self.loss_since += torch.where(total.isfinite(), sums, 0.0)

    def mean_loss(self) -> float | None:
        """Return the loss per token in `loss_since`. Waits for the device."""
        total, tokens = self.loss_since.tolist()
        return total / tokens if tokens else None


class Log:
    """Rank 0's terminal and files; does nothing on other ranks.

    Never raises: a stream or file that can't be written is reported once on stderr, and tried again each time.
    """

    def __init__(self, folder: Path, enabled: bool) -> None:
        self._enabled = enabled
        self.attempt = 0  # the attempt's number, once it has taken over the run's folder
        self._folder = folder
        self._text = folder / "train.log"
        self._failed: set[str] = set()
        self._trackers: dict[str, Tracker] = {}

    def info(self, text: str, *, cut: bool = False) -> None:
        """Write text to the terminal and to train.log. `cut`: a line too long for a terminal is cut off there."""
        if not self._enabled:
            return
        with self._reported("stdout"):
            columns = shutil.get_terminal_size().columns if cut and sys.stdout.isatty() else None
            tqdm.write(text[:columns], file=sys.stdout)
            sys.stdout.flush()
        self._append(self._text, text)

    def track(self, config: LogConfig, state: TrainState) -> None:
        """From now on, send the records of metrics.jsonl to `log.trackers`."""
        for name in config.trackers if self._enabled else ():
            with self._dropped_on_error(name):
                self._trackers[name] = pkgutil.resolve_name(TRACKERS[name].open)(config, self._folder, state)

    def close(self) -> None:
        """Close the trackers."""
        self._of_trackers(lambda tracker: tracker.close())

    def _of_trackers(self, call: Callable[["Tracker"], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._dropped_on_error(name):
                call(tracker)

    @contextmanager
    def _dropped_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # any error: a tracker must not end a run
            self._trackers.pop(name, None)
            print_error(f"log.trackers: {name} failed: {error}; training continues without it")

    def record(self, values: dict[str, Any], file: str = "metrics.jsonl") -> None:
        """Append a line to a file of records."""
        if self._enabled:
            with self._reported(f"a record of {file}"):
                about = {"attempt": self.attempt, "time": round(time.time(), 3)}
                self._append(self._folder / file, json.dumps({**values, **about}))
            if file == "metrics.jsonl":
                self._of_trackers(lambda tracker: tracker.write(dict(values)))  # a copy, which it may change

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """Report an error in this context, once for each `what`."""
        try:
            yield
        except Exception as error:  # any error: losing a line is better than losing the run
            if what not in self._failed:
                self._failed.add(what)
                print_error(f"{what} can't be written: {error}; training continues")

    def _append(self, file: Path, line: str) -> None:
        with self._reported(str(file)):
            append_line(file, line)

    def progress(self, first: int, last: int) -> Iterator[int]:
        """Yield the steps from `first` to `last`, with a progress bar if stderr is a terminal."""
        shown = self._enabled and sys.stderr.isatty()
        bar = tqdm(initial=first - 1, total=last, unit="step", dynamic_ncols=True, leave=False, disable=not shown)
        try:
            for step in range(first, last + 1):
                yield step
                with self._reported("the progress bar"):
                    bar.update()
        finally:
            with self._reported("the progress bar"):
                bar.close()
