"""Being asked to leave: SIGTERM, SIGINT (Ctrl-C), SIGUSR1, or the time limit. The step is finished first.

A handler only takes a note. The loop adds every rank's note into the reduction that it does anyway, so that all ranks
leave after the same step. A second Ctrl-C does not wait for that.
"""

import signal
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Leaving:
    """Whether this process was asked to leave, and why. Handlers are installed while it is used as a context."""

    def __init__(self, max_minutes: float) -> None:
        self.reason = ""
        self._limit_s = 60 * max_minutes if max_minutes else float("inf")
        self._max_minutes = max_minutes
        self._started = time.monotonic()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Leaving":
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.reason and number == signal.SIGINT and "SIGINT" in self.reason:
            raise KeyboardInterrupt
        self.reason = self.reason or signal.Signals(number).name

    def asked(self) -> bool:
        """Whether to leave after this step."""
        if not self.reason and time.monotonic() - self._started > self._limit_s:
            self.reason = f"run.max_minutes = {self._max_minutes:g}"
        return bool(self.reason)
