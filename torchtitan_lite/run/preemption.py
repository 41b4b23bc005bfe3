"""Preemption: on a signal (TERM, INT, HUP, USR1) or at the time limit, the run stops after a step, saves and exits.

It does the same if a machine of the same job waits to join it (`run_folder.lock`). A signal only sets a reason. Each
step's record sums the requests of all ranks, so all stop after the same step: this one or the next. The handlers exist
while the run trains; during build and load a signal has its default effect. A second Ctrl-C (INT) ends the process at
once, without saving. Any other signal after the first repeats the request: Slurm signals both launcher and workers, and
torchrun forwards signals.

Python runs a handler in the main thread, between two instructions. Waiting for a lock, a file or another thread does
not delay it, a collective does: a rank that waits for another one inside gloo or NCCL sees the signal only afterwards.
If that never happens, torchrun (30 s after its signal) or the watchdog ends the process.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from torchtitan_lite.distributed.process_group import Process, sum_over_ranks
from torchtitan_lite.errors import within
from torchtitan_lite.run.run_folder import JOINS

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Preemption:
    """Whether this process was asked to stop, and why. As a context manager it installs and restores the handlers.

    Args:
        max_minutes: the time limit; 0: none.
        joining: a file that exists while a machine waits to join.
        clock: monotonic, in seconds.
    """

    def __init__(self, max_minutes: float, joining: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason = ""
        self.agreed = False  # whether any rank was asked to stop; one step late, equal on all ranks
        self.on_abort: Callable[[str], Any] = lambda _: None  # called with the reason before the process ends at once
        self._max_minutes = max_minutes or float("inf")
        self._clock, self._joining = clock, joining
        self._started = self._looked = clock()
        self._interrupted = False  # a first Ctrl-C has arrived
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Preemption":
        # nohup ignores SIGHUP, and that stays so (torchrun handles it even then)
        self._before = {
            number: signal.signal(number, self.received)
            for number in SIGNALS
            if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def received(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal."""
        if number == signal.SIGINT and self._interrupted:
            self._end_at_once()
        self._interrupted |= number == signal.SIGINT
        self.reason = self.reason or signal.Signals(number).name

    def _end_at_once(self) -> None:
        why = "a second Ctrl-C: stopped without saving"
        text = f"train.py: {why}; the same command resumes from the newest checkpoint\n"
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(2, text.encode())  # the interrupted code may be writing to sys.stderr
        within(2.0, self.on_abort, why)  # a hanging file system must not keep this process alive
        os._exit(128 + signal.SIGINT)

    def requested(self) -> bool:
        """Return whether this rank was asked to stop."""
        if not self.reason and self._clock() - self._started > 60 * self._max_minutes:
            self.reason = self.reason or f"run.max_minutes = {self._max_minutes:g}"
        if not self.reason and self._clock() - self._looked > 5:  # not at each step: a shared file system is slow
            self._looked = self._clock()
            if self._joining.exists():
                self.reason = self.reason or JOINS  # a signal may have come meanwhile
        return bool(self.reason)

    def agree(self, process: Process) -> None:
        """Ask all ranks now whether any was asked to stop. Collective; for the time between two steps."""
        requests = torch.tensor(float(self.requested()), device=process.device)
        self.agreed |= bool(sum_over_ranks(requests) > 0)


def launcher_note(reason: str) -> str:
    """Return a note for a stopping run: torchrun reports every signal as an error, with a long traceback."""
    if "TORCHELASTIC_MAX_RESTARTS" not in os.environ or not reason.startswith("SIG"):
        return ""
    return "\nnote    torchrun now prints a traceback of its own for the signal: it is expected, and nothing is lost"
