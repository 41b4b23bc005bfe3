"""The watchdog: if a rank dies or no rank makes progress, it names that rank, writes stacks, and ends the run.

At each interval, one thread of each rank publishes in torch's store where the rank is and how many bytes it moved
(progress.py). The first rank of each machine, while it stays where it is, reads the other ranks' entries:

    a rank moves on, moves bytes, or uses a             wait: saves and compilations may take any time
    processor while it starts or compiles
    none does for run.timeout_minutes                   each rank writes its stacks and ends
    a rank published nothing for
    run.start_timeout_minutes before the first step     the same: its machine died during startup
    the groups do not connect within that time          the same

With NCCL, a rank that waits for a dead one gets no error. Each rank locks its file in stacks/, and writes `_LEFT` into
it before it leaves. So a second thread of each rank that stays where it is looks each second for a reason to end:

    a rank of this machine released its lock            it died during training: publish that in the store, write
    without that line, and this one stays for 5 s       stacks and end
    any rank published why the run ends                 the same, with the published reason

The threads end the process, because the main thread may be blocked in a collective or by a disk. The process groups
have no time limit (`set_group_timeouts`).
"""

import contextlib
import faulthandler
import fcntl
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch.distributed as dist
from torch._C import _distributed_c10d

from torchtitan_lite import progress
from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.distributed.lost import KILLED, explaining_lost_ranks
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.environment import local_rank
from torchtitan_lite.errors import StuckError, report, within
from torchtitan_lite.files import naming

_AT, _BEAT, _END = "torchtitan_lite/at/{}", "torchtitan_lite/beat/{}", "torchtitan_lite/end"
_LEFT = b"--- the end of this process ends no other one\n"
_LOOK_S, _STILL_S = 1.0, 5.0  # how often a rank looks for a reason to end, and how long it must have stayed in place


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
    others = "the others wait for " * (len(waited_for) < len({*states, *silent}))
    whom = f"{others}{', '.join(waited_for)}" if waited_for else "all ranks are at the same place"
    return f"{furthest.task}: no rank made progress for {limit}; {whom}"


class Watchdog:
    """Watches this rank until `close`. Collective: every rank creates one."""

    def __init__(self, folder: Path, process: Process, limits: RunConfig) -> None:
        assert process.store is not None
        self.on_abort: Callable[[str], Any] = lambda _: None  # called with the reason before the process ends
        self._world, self._store, self._at = process, process.store, Place()
        self._path = folder / "stacks" / f"rank-{process.rank}.txt"
        with naming(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            # stacks of earlier attempts stay, because error messages refer to this file
            self._is_new = not self._path.stat().st_size
            self._file.write(f"--- attempt of {time.strftime('%F %T')}, process {os.getpid()}\n".encode())
        try:  # until `close`, or the end of the process
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # no locks here, or a process of the last attempt still holds it: its end is not this one's
            self._file.write(_LEFT)
        self._size = self._path.stat().st_size

        self._timeout_s, self._start_timeout_s = (
            60 * limits.timeout_minutes,
            60 * limits.start_minutes(process.world_size),
        )
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
        dist.barrier()  # until all ranks have published, and locked their files
        self._first = process.rank - local_rank()  # of this machine
        self._on_host = f" on {os.uname().nodename}" if process.local_world_size < process.world_size else ""
        self._neighbours = self._open_files() if process.world_size > 1 else {}
        self._left = self._over = False  # see `training`
        self._closed = threading.Event()
        for target in (self._watch, self._watch_others)[: process.world_size]:
            threading.Thread(target=target, name="watchdog", daemon=True).start()

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
        """Note that all ranks load or connect something in this context, and synchronise at the end."""
        with progress.doing(what), explaining_lost_ranks(lambda: what, self._why_closed):
            yield
            dist.barrier(group=self._world.untimed)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Turn a communication error in this context into a StuckError that names the rank that died.

        A rank leaves properly at the end of this context, not by an error. Then no other rank ends it anymore.
        """
        try:
            with explaining_lost_ranks(lambda: RankState(self._at, progress.operations()).task, self._why_closed):
                yield
            self._left = True
        finally:
            self._over = True

    def close(self) -> None:
        """Stop watching, release the lock, and remove a file without stacks."""
        self._closed.set()
        with contextlib.suppress(OSError):  # a full disk, or the file is gone
            unused = self._is_new and self._path.stat().st_size == self._size
            self._file.write(_LEFT if self._left else b"")
            if unused:
                self._path.unlink()
                self._path.parent.rmdir()  # by the last rank
        self._file.close()

    # --- ranks that died ----------------------------------------------------------------------------------------

    def _why_closed(self) -> str:
        self._left = self._over = True  # the main thread reports the reason
        who = "a process on another machine died, or the network to it failed" if self._on_host else "a process died"
        return within(3.0, self._reason, True, 2.0) or f"{who}. {KILLED}"

    def _reason(self, locks: bool, within_s: float = 0.0) -> str:
        """Return why the run ends: a rank of this machine died, or what any rank published; empty if neither is known.

        Args:
            locks: whether to look for dead ranks.
            within_s: how long to wait, because a killed process closes its connections and files in any order.
        """
        end = time.monotonic() + within_s
        while True:
            if died := [rank for rank, file in self._neighbours.items() if locks and _died(file)]:
                return self._publish(
                    f"a process died{self._on_host}: {', '.join(map(self._last_seen, died))}. {KILLED}"
                )
            with contextlib.suppress(RuntimeError):  # the store is gone
                if self._thread_store.check([_END]):
                    return self._thread_store.get(_END).decode()
            if time.monotonic() >= end:
                return ""
            time.sleep(0.05)

    def _publish(self, reason: str) -> str:
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._thread_store.set(_END, reason)
        return reason

    def _last_seen(self, rank: int) -> str:
        with contextlib.suppress(RuntimeError):  # the store is gone
            return f"rank {rank} (last seen: {Place(*json.loads(self._thread_store.get(_AT.format(rank))))})"
        return f"rank {rank}"

    def _open_files(self) -> dict[int, BinaryIO]:
        """Return the files of this machine's ranks, open because a rank that leaves may remove its own.

        Returns {} if locks do not work, or only within a machine while ranks are not numbered machine by machine.
        """
        with contextlib.suppress(OSError):
            files: dict[int, Any] = {
                rank: self._path.with_name(f"rank-{rank}.txt").open("rb", 0)
                for rank in range(self._first, self._first + self._world.local_world_size)
            }
            return {} if any(map(_died, files.values())) else files
        return {}

    def _watch_others(self) -> None:
        last, since = None, 0.0
        while not (self._closed.wait(_LOOK_S) or self._over):
            now = self._at, progress.operations(), progress.moved()
            if now != last:
                last, since = now, time.monotonic()
            elif (
                reason := self._reason(self._at.step > 0 and time.monotonic() - since >= _STILL_S)
            ) and not self._over:
                self._end(reason)

    # --- no rank makes progress ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        before, last = time.monotonic(), None
        while not self._closed.wait(self._interval_s):
            now = time.monotonic()
            # time while this process was stopped does not count
            elapsed_s, before = min(now - before, 3 * self._interval_s), now
            self._look(elapsed_s)
            within(self._interval_s, self._exchange)  # the store's machine may not answer
            self._quiet_s += elapsed_s
            known = self._own, dict(self._others)
            at_start = not self._own.place.step and (self._own.task.startswith("connecting ") or self._silent())
            if known != last or (self._world.world_size == 1 and not self._own.operations):
                last, self._quiet_s = known, 0.0
                self._beats.clear()
            elif not self._reads():  # the first rank of this machine decides
                self._quiet_s = 2 * self._interval_s
            elif self._quiet_s >= (self._start_timeout_s if at_start else self._timeout_s):
                self._abort("run.start_timeout_minutes" if at_start else "run.timeout_minutes")

    def _look(self, elapsed_s: float) -> None:
        """Update the state of this process: where it is, and whether it moves."""
        operations, worked = progress.operations(), 0
        if (not self._at.step and not operations) or progress.compiles():  # ranks do not spin while they wait
            before, self._processor_s = self._processor_s, sum(os.times()[:4])
            worked = self._processor_s - before > elapsed_s / 10  # also on a busy machine
        self._worked += worked
        self._own = RankState(self._at, operations, progress.moved() + self._worked)

    def _exchange(self) -> None:
        """Publish a beat. If no rank is known to make progress, read the others' beats, or only their reader's."""
        process, store = self._world, self._thread_store
        self._number += 1
        store.set(_BEAT.format(process.rank), json.dumps([self._number, *self._own[1:]]))
        if process.world_size > 1 and self._quiet_s >= 2 * self._interval_s:
            read = range(process.world_size) if self._reads() else [self._first]
            others = [rank for rank in read if rank != process.rank]
            texts = store.multi_get([key.format(rank) for key in (_AT, _BEAT) for rank in others])
            values, now = [json.loads(text) for text in texts], time.monotonic()
            for rank, at, (number, operations, moved) in zip(others, values, values[len(others) :], strict=False):
                self._others[rank] = RankState(Place(*at), operations, moved)
                if self._beats.get(rank, (0, 0))[0] != number:
                    self._beats[rank] = number, now
        self._answered = time.monotonic()

    def _reads(self) -> bool:
        """Return whether this rank reads all ranks' beats: one per machine, as the store answers on a single thread.

        Another one does if the first rank's process is stopped.
        """
        missing_s = time.monotonic() - self._beats.get(self._first, (0, self._answered))[1]
        return self._world.rank == self._first or missing_s >= 4 * self._interval_s

    def _silent(self) -> dict[int, float]:
        """Return the seconds since each silent rank's newest beat. Rank 0's machine hosts the store."""
        now = time.monotonic()
        unanswered_s = now - self._answered
        seconds = {rank: now - at for rank, (_, at) in dict(self._beats).items()}
        if unanswered_s >= self._silent_s:  # the other ranks' states are unknown
            seconds = {0: unanswered_s}
        return {rank: each for rank, each in seconds.items() if each >= self._silent_s}

    def _abort(self, limit: str) -> None:
        seconds = self._start_timeout_s if limit == "run.start_timeout_minutes" else self._timeout_s
        what = explain_hang(self._others | {self._world.rank: self._own}, self._silent(), f"{limit} = {seconds / 60:g}")
        reason = f"{what}. Stacks are in {self._path.parent}; a process that is stopped or was killed writes none"
        self._over = True  # this thread ends the process
        within(1.0, self._publish, reason)
        self._end(reason, 5 * _LOOK_S)

    def _end(self, reason: str, wait_s: float = 0.0) -> None:
        """Write stacks, traces, status and message, and end this process, whatever its other threads wait for.

        Args:
            wait_s: time for the other ranks to come to the same end, before a launcher ends them.
        """
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=self._file)
            self._file.write(_LEFT)
        within(10.0, write_traces, self._path.parent, self._world)
        within(5.0, self.on_abort, reason)
        time.sleep(wait_s)
        lower = [file for rank, file in self._neighbours.items() if rank < self._world.rank]
        report(f"train.py: {reason}", 0 if lower and all(map(_died, lower)) else local_rank())
        os._exit(StuckError.exit_code)


def write_traces(folder: Path, process: Process) -> None:
    """Write this rank's newest collectives from torch's flight recorder, as files that torchfrtrace reads."""
    if dump := getattr(_distributed_c10d, "_dump_fr_trace_json", None):  # of gloo; torch leaves out its groups
        groups = {
            group.group_name: {"desc": group.group_desc, "ranks": str(dist.get_process_group_ranks(group))}
            for group in list(dist.distributed_c10d._world.pg_map)
        }
        (folder / f"gloo_trace_rank_{process.rank}").write_bytes(
            pickle.dumps(json.loads(dump()) | {"pg_config": groups})
        )
    if process.device.type == "cuda" and (dump := getattr(_distributed_c10d, "_dump_nccl_trace", None)):
        (folder / f"nccl_trace_rank_{process.rank}").write_bytes(dump())


def _died(file: BinaryIO) -> bool:
    """Return whether a rank's file is unlocked, and says that the rank did not leave by itself."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        file.seek(0)
        return not file.read().endswith(_LEFT)
    except (OSError, ValueError):  # it is locked, or `close` was called just now
        return False
