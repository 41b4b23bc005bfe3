"""Hanging steps: which ranks the others wait for. Loaded for several ranks only.

gloo raises an error when a collective takes longer than the timeout, and `explain` names the ranks that are behind.
NCCL raises none: its watchdog aborts the process (SIGABRT) as soon as a collective was issued longer ago than the
timeout, while the main thread is blocked in C. So `problem` ends the run at nine tenths of the timeout. A thread of the
Watchdog calls it.

Each rank publishes where it is: step, phase, and number of forward passes. A rank that is ahead of another one and does
not move waits for it. If all ranks are at the same place and none moves, they may wait for each other, or all compute
something long. On a GPU, where collectives are always pending, this is a hang, unless a rank is compiling. On a CPU
gloo's error decides.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.checkpointing.progress import Place
from torchtitan_lite.distributed.process_group import World

_AT = "torchtitan_lite/at/{}"
_COMPILERS = "/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py"

# Error texts of gloo, the store and NCCL when another process is gone or late. (Most of the latter two are DistErrors.)
_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "application timeout caused pair closure",
    "broken pipe",
    "socket closed",
    "socket timeout",
    "timed out waiting",
    "timed out in monitoredbarrier",
    "operation timed out!",
    "connect timeout",
    "read timeout",
    "write timeout",
    "wait timeout",
    "timeout waiting for key",
    "collective operation timeout",
    "remote process exited",
)


# NCCL's errors of this rank alone: wrong use, such as two ranks on one GPU, or a failed CUDA call
_LOCAL = "ncclinvalidusage", "ncclinvalidargument", "ncclunhandledcudaerror"


def is_lost(error: RuntimeError) -> bool:
    """Whether an error means that another rank is gone or too late."""
    text = str(error).lower()
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
        return False  # its text may quote any code, and the pipes of compiler processes break, too
    if isinstance(error, dist.DistError):
        return not any(phrase in text for phrase in _LOCAL)
    return any(phrase in text for phrase in _LOST)


class StepTimer:
    """Measures how long this rank has been at one place, and compares it with the others.

    Args:
        store: also used by another thread.
        interval_s: the time between two calls of `problem`.
        stacks: the folder that messages refer to.
    """

    def __init__(self, world: World, store: Any, timeout_s: float, interval_s: float, stacks: Path) -> None:
        self._world, self._store, self._stacks = world, store, stacks
        self._timeout_s, self._interval_s = timeout_s, interval_s
        self._last = Place()
        self._quiet_s, self._before = 0.0, time.monotonic()

    def publish(self, store: Any, at: Place) -> None:
        """Called by the main thread, with a store of its own."""
        store.set(_AT.format(self._world.rank), " ".join(map(str, at)))

    def explain(self, error: RuntimeError, at: Place) -> str:
        """The message for a communication error; "" for any other error."""
        if not is_lost(error):
            return ""
        what = f"lost the other ranks, or waited for {self._timeout_s / 60:g} minutes (run.timeout_minutes)"
        return f"{self._message(what, at, self._places())} {str(error).splitlines()[0]}"

    def problem(self, at: Place) -> str:
        """The message if this rank, which is at this place, waits in vain; otherwise "". Call it at each interval."""
        now = time.monotonic()
        # the time in which this process was stopped does not count
        self._quiet_s += min(now - self._before, 2 * self._interval_s)
        self._before = now
        if at != self._last or progress.main_is_doing():  # saves and loads have no time limit
            self._last, self._quiet_s = at, 0.0
        # two intervals earlier, because time is only looked at once in each
        if at.phase == 0 or self._quiet_s < 0.9 * self._timeout_s - 2 * self._interval_s:
            return ""
        places = self._places()
        if any(other > at for other in places.values()):
            return ""  # those wait for this rank, which may be computing
        if all(other == at for other in places.values()) and (self._world.device.type != "cuda" or _compiles()):
            return ""
        limit = f"run.timeout_minutes = {self._timeout_s / 60:g}"
        return self._message(f"waited for the other ranks for nine tenths of {limit}", at, places)

    def _message(self, what: str, at: Place, places: dict[int, Place]) -> str:
        found = []
        for rank, other in sorted(places.items()):
            if other < at:
                passes = f", forward pass {other.passes}" if other[:2] == at[:2] else ""
                found.append(f"rank {rank} ({other}{passes})")
        who = f"behind: {', '.join(found)}" if found else "all ranks had reached it"
        stacks = f"Stacks of processes that took too long are in {self._stacks}."
        return f"rank {self._world.rank}, step {at.step}: {what}; {who}. {stacks}"

    def _places(self) -> dict[int, Place]:
        """Where the other ranks are; those that the store names within five seconds, because its host may be gone."""
        found: dict[int, Place] = {}

        def read() -> None:
            for rank in range(self._world.world_size):
                if rank != self._world.rank:
                    key = _AT.format(rank)
                    text = self._store.get(key).decode() if self._store.check([key]) else "0 0 0"
                    found[rank] = Place(*map(int, text.split()))

        reading = threading.Thread(target=_quietly, args=(read,), daemon=True)
        reading.start()
        reading.join(timeout=5)
        return dict(found)


def _quietly(action: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the store is gone
        action()


def _compiles() -> bool:
    """Whether a thread of this process compiles a block, which takes as long as it takes."""
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None:
            if inner.f_code.co_filename.endswith(_COMPILERS):
                return True
            inner = inner.f_back
    return False
