"""Hanging steps: which ranks the others wait for.

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
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.distributed.process_group import World

_AT = "torchtitan_lite/at/{}"
_COMPILERS = "/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py"

# Error texts of gloo, the store and NCCL when another process is gone or late. (Most of the latter two are DistErrors.)
_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "remote process exited",
)
_LATE = (
    "application timeout caused pair closure",
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
    return any(phrase in text for phrase in _GONE + _LATE)


def is_gone(error: RuntimeError) -> bool:
    """Whether an error of `is_lost` means that a connection was closed, rather than that a time limit was reached."""
    text = str(error).lower()
    return any(phrase in text for phrase in _GONE) or not any(phrase in text for phrase in _LATE)


def silence(rank: int, seconds: float, last_seen: object) -> str:
    """The text for a rank whose watchdog is silent."""
    return (
        f"rank {rank} silent for {seconds:.0f} s (its process is stopped, or its machine does not answer; last seen: "
        f"{last_seen})"
    )


def explain_start(error: RuntimeError, rank: int) -> str:
    """The message for a communication error before there is a Watchdog."""
    if is_gone(error):
        return _reset(f"rank {rank}, starting", "a process died", error)
    return f"rank {rank}, starting: waited for the other ranks for run.timeout_minutes. {_shortened(error)}"


def _reset(where: str, who: str, error: RuntimeError) -> str:
    return (
        f"{where}: connection reset: {who}. If that process printed no error, it was killed; dmesg on its machine "
        f"names it if the kernel did so for lack of memory. {_shortened(error)}"
    )


def _shortened(error: RuntimeError) -> str:
    """The first line, without gloo's place in its source and its advice."""
    first = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0])
    return f"({first.partition('. This is typically caused')[0]})"


class Place(NamedTuple):
    """Where the main thread is."""

    step: int = 0
    phase: int = 0  # 0: fetching its batch, 1: computing
    passes: int = 0  # forward passes in this phase

    def __str__(self) -> str:
        return f"step {self.step}, {('fetching its batch', 'computing')[self.phase]}" if self.step else "starting"


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

    def explain(self, error: RuntimeError, at: Place, silent: Mapping[int, float], ended: Sequence[int]) -> str:
        """The message for a communication error.

        Args:
            silent: the ranks whose watchdogs are silent, for so many seconds.
            ended: the ranks of this machine whose processes have ended.
        """
        places = self._places()
        if not is_gone(error):
            what = f"waited for the other ranks for run.timeout_minutes = {self._timeout_s / 60:g}"
            named = re.search(r"at a barrier in shared memory: rank ([\d, ]+)$", str(error))
            late = [int(rank) for rank in named[1].split(", ")] if named else []
            return f"{self._message(what, at, places, silent, late)} {_shortened(error)}"
        who = "a process died"
        if ended:
            each = (f"rank {rank}" + (f" (last seen: {places[rank]})" if rank in places else "") for rank in ended)
            who = f"a process died: {', '.join(each)}"
        elif self._world.local_world_size < self._world.world_size:
            who = "a process on another machine died, or the network to it failed"
        return _reset(f"rank {self._world.rank}, step {at.step}", who, error)

    def problem(self, at: Place, silent: Mapping[int, float]) -> str:
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
        return self._message(f"waited for the other ranks for nine tenths of {limit}", at, places, silent)

    def _message(
        self, what: str, at: Place, places: dict[int, Place], silent: Mapping[int, float], late: Sequence[int] = ()
    ) -> str:
        """`late`: ranks that are not where this one waits, though they may be in the same pass."""
        absent = [silence(rank, silent[rank], places.get(rank, "unknown")) for rank in sorted(silent)]
        behind = []
        for rank, other in sorted(places.items()):
            if (other < at or rank in late) and rank not in silent:
                passes = f", forward pass {other.passes}" if other[:2] == at[:2] else ""
                behind.append(f"rank {rank} ({other}{passes})")
        if behind:
            absent.append(f"behind: {', '.join(behind)}")
        all_known = len(places) == self._world.world_size - 1
        nobody = (
            "all ranks had reached it" if all_known else "where the others are is unknown: the store does not answer"
        )
        stacks = (
            f"Stacks of processes that took too long are in {self._stacks}; a process that is stopped or was killed "
            "writes none."
        )
        return f"rank {self._world.rank}, step {at.step}: {what}; {'; '.join(absent) or nobody}. {stacks}"

    def _places(self) -> dict[int, Place]:
        """Where the other ranks are; those that the store names within five seconds, because its host may be gone."""
        places: dict[int, Place] = {}

        def read() -> None:
            with contextlib.suppress(RuntimeError):  # the store is gone
                for rank in range(self._world.world_size):
                    if rank != self._world.rank:
                        key = _AT.format(rank)
                        text = self._store.get(key).decode() if self._store.check([key]) else "0 0 0"
                        places[rank] = Place(*map(int, text.split()))

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        reading.join(timeout=5)
        return dict(places)


def _compiles() -> bool:
    """Whether a thread of this process compiles a block, which takes as long as it takes."""
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None:
            if inner.f_code.co_filename.endswith(_COMPILERS):
                return True
            inner = inner.f_back
    return False
