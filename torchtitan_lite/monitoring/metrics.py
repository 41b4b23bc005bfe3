"""What a run says: lines on the terminal and in train.log, records in metrics.jsonl. Only rank 0 speaks."""

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
    """Whatever else wants each record (trackers.py)."""

    def record(self, values: dict[str, Any]) -> None: ...


class Clock:
    """The time of training, without that of saves and validations."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._lap_started = self.started
        self._parts: dict[str, float] = {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is not training."""
        before = time.perf_counter()
        yield
        self._lap_started += time.perf_counter() - before

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Time in here is a part of training that has a name."""
        before = time.perf_counter()
        yield
        self._parts[part] = self._parts.get(part, 0.0) + time.perf_counter() - before

    def lap(self) -> tuple[float, dict[str, float]]:
        """Seconds of training since the last lap, and how many of them each named part took."""
        now = time.perf_counter()
        seconds, parts = now - self._lap_started, self._parts
        self._lap_started, self._parts = now, {}
        return seconds, parts


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this rank has held so far, in GiB (2^30 bytes): reserved on the GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


class Log:
    """Rank 0's terminal and files; on the other ranks it does nothing.

    Nothing here raises: a full disk or a closed terminal must not end a run before it saves. Each stream or file that
    can't be written is reported once, on stderr, and tried again every time.
    """

    def __init__(self, folder: Path, speaks: bool) -> None:
        self._speaks = speaks
        self._folder = folder
        self._text = folder / "train.log"
        self._bar: tqdm[Any] | None = None
        self._torn: set[Path] = set()  # files whose last line may be half written
        self._failed: set[str] = set()
        self._trackers: Tracker | None = None

    def info(self, text: str, fit: Callable[[str, int], str] | None = None) -> None:
        """A line for the terminal and for train.log.

        Args:
            fit: makes it short enough for a terminal, and is told how many columns that has.
        """
        if not self._speaks:
            return
        with self._reported("stdout"):
            shown = fit(text, shutil.get_terminal_size().columns) if fit and sys.stdout.isatty() else text
            tqdm.write(encodable(shown, sys.stdout), file=sys.stdout)
            sys.stdout.flush()
        self._append(self._text, text)

    def attach(self, trackers: Tracker) -> None:
        """Hand the records of metrics.jsonl on, from now on."""
        self._trackers = trackers if self._speaks else None

    def record(self, values: dict[str, Any], file: str = "metrics.jsonl") -> None:
        """One line of a file of records."""
        if self._speaks:
            with self._reported(f"a record of {file}"):
                self._append(self._folder / file, json.dumps({**values, "time": round(time.time(), 3)}))
            if self._trackers is not None and file == "metrics.jsonl":
                self._trackers.record(values)

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """An error in here is reported, once for each `what`."""
        try:
            yield
        except Exception as error:  # whatever it is: a line less is better than a run less
            if what not in self._failed:
                self._failed.add(what)
                print_error(f"{what} can't be written: {error}; training goes on")

    def _append(self, file: Path, line: str) -> None:
        """Add a line. After a failed write it begins on a new line: the one before may lack its end."""
        with self._reported(str(file)):
            start = "\n" if file in self._torn else ""
            self._torn.add(file)
            with file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(f"{start}{line}\n")
            self._torn.discard(file)

    def without_later(self, step: int) -> dict[str, bytes]:
        """The files that hold records of later steps, without those: after a resume each step stands there once."""
        changed = {}
        for file in (self._folder / "metrics.jsonl", self._folder / "samples.jsonl"):
            if file.is_file():
                content = file.read_bytes()
                complete = (line for line in content.splitlines(keepends=True) if line.endswith(b"\n"))
                kept = b"".join(line for line in complete if _step_of(line) <= step)
                if kept != content:
                    changed[file.name] = kept
        return changed

    def start_bar(self, step: int, steps: int) -> None:
        """A progress bar, on a terminal only."""
        with self._reported("the progress bar"):
            if self._speaks and sys.stderr.isatty():
                self._bar = tqdm(initial=step, total=steps, unit="step", dynamic_ncols=True, leave=False)

    def advance_bar(self) -> None:
        """One step more."""
        if self._bar is not None:
            with self._reported("the progress bar"):
                self._bar.update()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            with self._reported("the progress bar"):
                self._bar.close()
            self._bar = None


def _step_of(line: bytes) -> float:
    """The step of a record; infinite for a line that is none, as a killed process leaves it."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")
