"""The watchdog: if no rank makes progress, it names the rank that the others wait for, writes stacks, and ends the run.

At each interval, one thread of each rank publishes in torch's store where the rank is and how many bytes it moved
(progress.py). A rank that stays where it is reads the other ranks' entries:

    a rank moves on, moves bytes, or uses a             wait: saves and compilations may take any time
    processor while it starts or compiles
    none does for run.timeout_minutes                   each rank writes its stacks and ends
    a rank published nothing for
    run.start_timeout_minutes before the first step     the same: its machine died during startup

The thread ends the process, because the main thread may be blocked in a collective or by a disk. The process groups
have no time limit (`set_group_timeouts`).
"""

import contextlib
import faulthandler
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from torchtitan_lite import progress
from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.distributed.lost import explaining_lost_ranks, first_line, gone_message, means_closed_connection
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.environment import local_rank
from torchtitan_lite.errors import ConfigError, StuckError, report

_AT, _BEAT = "torchtitan_lite/at/{}", "torchtitan_lite/beat/{}"
_SECONDARY = b"--- this process ends because a different one did\n"


class Place(NamedTuple):
    """Where a rank's main thread is."""

    step: int = 0
    phase: int = 0  # 0: fetching the batch, 1: computing
    passes: int = 0  # forward passes in this phase

    def __str__(self) -> str:
        return f"step {self.step}, {('fetching its batch', 'computing')[self.phase]}" if self.step else "starting"


class RankState(NamedTuple):
    """A rank's published entry. The rank makes progress while it changes."""

    place: Place = Place()
    operations: Sequence[tuple[str, bool]] = ()  # see progress.operations
    moved: int = 0  # bytes moved, plus intervals in which it used a processor

    @property
    def reached(self) -> tuple[Place, bool]:
        """How far the rank is. A rank that is behind compares lower: it may not take part in an operation yet."""
        return self.place, bool(self.operations)

    @property
    def task(self) -> str:
        """The operation or step that all ranks take part in."""
        operation = self.operations[0][0].partition(": ")[0] if self.operations else ""
        return operation or (f"step {self.place.step}" if self.place.step else "starting")

    def __str__(self) -> str:
        return "; ".join(text for text, _ in self.operations) or str(self.place)


def explain_hang(states: Mapping[int, RankState], silent: Mapping[int, float], limit: str) -> str:
    """Describe which ranks the others wait for: those that are silent, at work, or behind.

    Args:
        states: of the ranks whose state is known.
        silent: by rank that publishes nothing: for how many seconds.
    """
    furthest, waited_for = max(states.values(), key=lambda state: state.reached), []
    for rank in sorted(states.keys() | silent.keys()):
        state = states.get(rank)
        if rank in silent:
            waited_for.append(
                f"rank {rank}, silent for {silent[rank]:.0f} s (its process is stopped, or its machine does not "
                f"answer; last seen: {state or 'unknown'})"
            )
        elif state and (work := "; ".join(text for text, works in state.operations if works)):
            waited_for.append(f"rank {rank} ({work})")
        elif state and state.reached < furthest.reached:
            same_phase = state.place[:2] == furthest.place[:2] and not furthest.operations
            waited_for.append(f"rank {rank} ({state}{f', forward pass {state.place.passes}' if same_phase else ''})")
    whom = f"the others wait for {', '.join(waited_for)}" if waited_for else "all ranks are at the same place"
    return f"{furthest.task}: no rank made progress for {limit}; {whom}"


class Watchdog:
    """Watches this rank until `close`. Collective: every rank creates one."""

    def __init__(self, folder: Path, process: Process, limits: RunConfig) -> None:
        assert process.store is not None
        self.on_abort: Callable[[str], Any] = lambda _: None  # called with the reason before the process ends
        self._world, self._store, self._at = process, process.store, Place()
        self._path = folder / "stacks" / f"rank-{process.rank}.txt"
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{self._path} can't be written: {error.strerror or error}") from None
        # stacks of earlier attempts stay, because error messages refer to this file
        self._before = self._path.stat().st_size
        with contextlib.suppress(OSError):  # a full disk
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            self._file.write(f"--- attempt of {started}, process {os.getpid()}\n".encode())
        self._size = self._path.stat().st_size
        # until `close`, or the end of the process
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

        self._timeout_s, self._start_timeout_s = 60 * limits.timeout_minutes, 60 * limits.start_timeout_minutes
        self._interval_s = min(10.0, self._timeout_s / 40, self._start_timeout_s / 10)
        self._silent_s = min(self._timeout_s, self._start_timeout_s) / 2
        # a separate connection: a blocked thread must not block the main thread
        self._thread_store = self._store.clone()  # type: ignore[attr-defined]
        self._own, self._worked, self._processor_s = RankState(), 0, 0.0
        self._quiet_s = 0.0  # time since a rank is known to have made progress
        self._others: dict[int, RankState] = {}  # as last read
        self._beats: dict[int, tuple[int, float]] = {}  # by rank: number and time of its newest beat
        self._number, self._answered = 0, time.monotonic()  # number of the newest beat; when the store last answered
        self._reach(Place())
        self._exchange()
        dist.barrier()  # until all ranks have published
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    # --- the main thread ----------------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        """Note that a step begins."""
        self._reach(Place(number, 0))

    def computing(self) -> None:
        """Note that this rank has its batch."""
        self._reach(Place(self._at.step, 1))

    def forward(self) -> None:
        """Note that a forward pass begins."""
        self._reach(self._at._replace(passes=self._at.passes + 1))

    def _reach(self, at: Place) -> None:
        self._at = at
        if self._world.world_size > 1:  # at once: if this process dies, other ranks report where
            self._store.set(_AT.format(self._world.rank), json.dumps(at))

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """Note that all ranks load something in this context, and synchronise at the end."""
        with self.naming_lost_ranks(), progress.doing(what):
            yield
            dist.barrier(group=self._world.untimed)

    def naming_lost_ranks(self) -> contextlib.AbstractContextManager[None]:
        """Turn a communication error in this context into a StuckError that names the ranks that ended."""
        return explaining_lost_ranks(self._explain)

    def close(self) -> None:
        """Stop watching, and remove files without stacks."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):  # the file may be gone
            if self._path.stat().st_size == self._size:
                os.ftruncate(self._file.fileno(), self._before)  # no stacks were written
        self._file.close()
        with contextlib.suppress(OSError):  # the last rank removes the folder
            if not self._path.stat().st_size:
                self._path.unlink()
                self._path.parent.rmdir()

    # --- ranks that ended ---------------------------------------------------------------------------------------

    def _explain(self, error: RuntimeError) -> str:
        where = f"rank {self._world.rank}, {RankState(self._at, progress.operations()).task}"
        if not means_closed_connection(error):
            return f"{where}: timed out waiting for the other ranks. {first_line(error)}"
        who = "a process died"
        if ended := self._ended():
            who = f"a process died: {', '.join(f'rank {rank}{self._last_seen(rank)}' for rank in ended)}"
        elif self._world.local_world_size < self._world.world_size:
            who = "a process on another machine died, or the network to it failed"
        with contextlib.suppress(OSError):  # for `_has_ended` of others; `close` keeps the file
            self._file.write(_SECONDARY)
        return f"{where}: {gone_message(who, error)}"

    def _last_seen(self, rank: int) -> str:
        with contextlib.suppress(RuntimeError):  # the store is gone, too
            return f" (last seen: {Place(*json.loads(self._store.get(_AT.format(rank))))})"
        return ""

    def _ended(self) -> list[int]:
        """Wait up to two seconds for a process of this machine to have ended, and return the ended ranks.

        Returns [] if none has ended, locks do not work, or the folder is gone.
        """
        if self._has_ended(self._world.rank):
            return []
        first, end = self._world.rank - local_rank(), time.monotonic() + 2
        others = [r for r in range(first, first + self._world.local_world_size) if r != self._world.rank]
        while others and time.monotonic() < end:  # a killed process closes its connections and files in any order
            if ended := [rank for rank in others if self._has_ended(rank)]:
                return ended
            time.sleep(0.05)
        return []

    def _has_ended(self, rank: int) -> bool:
        """Return whether a rank's process ended first, not because of a different one: its file is unlocked or gone."""
        try:
            with self._path.with_name(f"rank-{rank}.txt").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return not file.read().endswith(_SECONDARY)
        except FileNotFoundError:
            return True
        except OSError:
            return False

    # --- the thread ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        before, last = time.monotonic(), None
        exchange = threading.Thread()
        while not self._closed.wait(self._interval_s):
            # for the case that this thread can't run, because a thread holds the interpreter's lock
            with contextlib.suppress(ValueError):  # `close` was called just now
                faulthandler.dump_traceback_later(self._timeout_s, file=self._file)
            now = time.monotonic()
            # time while this process was stopped does not count
            elapsed_s, before = min(now - before, 3 * self._interval_s), now
            self._look(elapsed_s)
            if not exchange.is_alive():  # in a separate thread: the store's machine may not answer
                exchange = threading.Thread(target=self._exchange, daemon=True)
                exchange.start()
            exchange.join(self._interval_s)
            self._quiet_s += elapsed_s
            known = self._own, dict(self._others)
            silent_at_start = not self._own.place.step and self._silent()
            if known != last or (self._world.world_size == 1 and not self._own.operations):
                last, self._quiet_s = known, 0.0
            elif self._quiet_s >= (self._start_timeout_s if silent_at_start else self._timeout_s):
                self._abort("run.start_timeout_minutes" if silent_at_start else "run.timeout_minutes")

    def _look(self, elapsed_s: float) -> None:
        """Update the state of this process: where it is, and whether it moves."""
        operations, worked = progress.operations(), 0
        if (not self._at.step and not operations) or progress.compiles():  # ranks do not spin while they wait
            before, self._processor_s = self._processor_s, progress.processor_s()
            worked = self._processor_s - before > elapsed_s / 4
        self._worked += worked
        self._own = RankState(self._at, operations, progress.moved() + self._worked)

    def _exchange(self) -> None:
        """Publish a beat. If no rank is known to make progress, read the other ranks' beats."""
        process, store = self._world, self._thread_store
        self._number += 1
        with contextlib.suppress(RuntimeError):  # the store is gone
            store.set(_BEAT.format(process.rank), json.dumps([self._number, *self._own[1:]]))
            if process.world_size > 1 and self._quiet_s >= 2 * self._interval_s:
                others = [rank for rank in range(process.world_size) if rank != process.rank]
                texts = store.multi_get([key.format(rank) for key in (_AT, _BEAT) for rank in others])
                values, now = [json.loads(text) for text in texts], time.monotonic()
                for rank, at, (number, operations, moved) in zip(others, values, values[len(others) :], strict=False):
                    self._others[rank] = RankState(Place(*at), operations, moved)
                    if self._beats.get(rank, (0, 0))[0] != number:
                        self._beats[rank] = number, now
            self._answered = time.monotonic()

    def _silent(self) -> dict[int, float]:
        """Return the seconds since each silent rank's newest beat. Rank 0's machine hosts the store."""
        now = time.monotonic()
        unanswered_s = now - self._answered
        seconds = {rank: now - at for rank, (_, at) in self._beats.items()}
        if unanswered_s >= self._silent_s:  # the other ranks' states are unknown
            seconds = {0: unanswered_s}
        return {rank: each for rank, each in seconds.items() if each >= self._silent_s}

    def _abort(self, limit: str) -> None:
        """Write stacks, status and message, and end this process, whatever its other threads wait for."""
        seconds = self._start_timeout_s if limit == "run.start_timeout_minutes" else self._timeout_s
        what = explain_hang(self._others | {self._world.rank: self._own}, self._silent(), f"{limit} = {seconds / 60:g}")
        message = f"{what}. Stacks are in {self._path.parent}; a process that is stopped or was killed writes none"
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=self._file)
        reporting = threading.Thread(target=self.on_abort, args=(message,), daemon=True)
        reporting.start()
        reporting.join(timeout=5)  # the file system may hang
        time.sleep(3 * self._interval_s)  # the other ranks come to the same end
        report(f"train.py: {message}", local_rank())
        os._exit(StuckError.exit_code)
