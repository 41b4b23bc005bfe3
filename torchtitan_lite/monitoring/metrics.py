"""The log of a run: lines on the terminal and in train.log, records in metrics.jsonl. Only rank 0 writes."""

import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from torchtitan_lite.terminal import encodable, print_error

GIB = 2**30


class Tracker(Protocol):
    """Receives each record of metrics.jsonl (trackers.py)."""

    def record(self, values: dict[str, Any]) -> None: ...
    def rewound(self, step: int) -> None: ...


class Clock:
    """Measures training time without saves and validations."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._lap_started = self.started
        self._parts: dict[str, float] = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time in this context."""
        before = time.perf_counter()
        yield
        self._lap_started += time.perf_counter() - before

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Count the time in this context as a named part of training."""
        before = time.perf_counter()
        yield
        self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - before

    def lap(self) -> tuple[float, dict[str, float]]:
        """Seconds of training since the last lap, and the seconds of each named part."""
        now = time.perf_counter()
        seconds, parts = now - self._lap_started, self._parts
        self._lap_started, self._parts = now, {}
        return seconds, parts


def peak_memory_gib(device: torch.device) -> float:
    """This rank's peak memory so far, in GiB (2^30 bytes): reserved on the GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


class Log:
    """Rank 0's terminal and files; does nothing on other ranks.

    Never raises: a full disk or a closed terminal must not end a run. A stream or file that can't be written is
    reported once on stderr, and tried again each time.
    """

    def __init__(self, folder: Path, speaks: bool) -> None:
        self._speaks = speaks
        self._folder = folder
        self._text = folder / "train.log"
        self._bar: tqdm[Any] | None = None
        self._torn: set[Path] = set()  # files whose last line may be incomplete
        self._failed: set[str] = set()
        self.trackers: Tracker | None = None
        self._notifier: Any = None  # notify.Notifier

    def info(self, text: str, fit: Callable[[str, int], str] | None = None) -> None:
        """Write a line to the terminal and to train.log. `fit(text, columns)` shortens it for a terminal."""
        if not self._speaks:
            return
        with self._reported("stdout"):
            shown = fit(text, shutil.get_terminal_size().columns) if fit and sys.stdout.isatty() else text
            tqdm.write(encodable(shown, sys.stdout), file=sys.stdout)
            sys.stdout.flush()
        self._append(self._text, text)

    def attach(self, trackers: Tracker) -> None:
        """Pass all later records of metrics.jsonl to trackers."""
        self.trackers = trackers if self._speaks else None

    def record(self, values: dict[str, Any], file: str = "metrics.jsonl") -> None:
        """Append a line to a file of records."""
        if self._speaks:
            with self._reported(f"a record of {file}"):
                self._append(self._folder / file, json.dumps({**values, "time": round(time.time(), 3)}))
            if "spike" in values and file == "metrics.jsonl":
                self.notify("spike", values["step"])
            if self.trackers is not None and file == "metrics.jsonl":
                self.trackers.record(values)

    @contextmanager
    def notifying(self, run: str, variable: str) -> Iterator[None]:
        """Send events in this context to the webhook of `log.notify`, if `variable` is not empty."""
        if not variable or not self._speaks:
            yield
            return
        from torchtitan_lite.monitoring.notify import Notifier

        self._notifier = notifier = Notifier(run, variable)
        try:
            yield
        finally:
            self._notifier = None
            notifier.close()

    def notify(self, event: str, step: int | None, status: str = "", *, ends: bool = False) -> None:
        """Send failure, spike, stall or completion to the webhook, if there is one.

        Args:
            status: of the run, if it is not that of the event.
            ends: the process ends now.
        """
        if self._notifier is not None:
            self._notifier.send(event, step, status)
            if ends:
                self._notifier.close()

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
        """Append a line. After a failed write, start on a new line."""
        with self._reported(str(file)):
            start = "\n" if file in self._torn else ""
            self._torn.add(file)
            with file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(f"{start}{line}\n")
            self._torn.discard(file)

    def start_bar(self, step: int, steps: int) -> None:
        """Show a progress bar, if stderr is a terminal."""
        with self._reported("the progress bar"):
            if self._speaks and sys.stderr.isatty():
                self._bar = tqdm(initial=step, total=steps, unit="step", dynamic_ncols=True, leave=False)

    def advance_bar(self) -> None:
        if self._bar is not None:
            with self._reported("the progress bar"):
                self._bar.update()

    def close(self) -> None:
        if self._bar is not None:
            with self._reported("the progress bar"):
                self._bar.close()
            self._bar = None
