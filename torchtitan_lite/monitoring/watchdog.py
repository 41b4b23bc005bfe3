"""The watchdog: finds the rank that hangs, writes stacks, and ends all ranks.

1. Steps. The collectives of training time out after `run.timeout_minutes`. Shortly before, a slow rank writes its
   stacks, and ranks that wait name those that are behind, and end the run (hang.py).
2. Saves, loads and verifications have no time limit; progress.py counts their bytes. One thread per rank publishes its
   count, and rank 0 publishes the sum. A second thread checks it without waiting for the store:

       bytes move on any rank                            wait
       none moved for run.timeout_minutes                rank 0 names the ranks that block, and all ranks end
                                                         (GPUs: for nine tenths of it, see hang.py)
       rank 0 is silent for a quarter longer             each rank ends by itself, and names rank 0

   These threads end the process, because the main thread may be blocked in a collective or by a disk.
"""

import contextlib
import faulthandler
import fcntl
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.distributed.process_group import World, limit_group_timeouts
from torchtitan_lite.errors import ConfigError, StuckError, report
from torchtitan_lite.monitoring.hang import Place, StepTimer, explain_start, is_gone, is_lost, silence
from torchtitan_lite.process import local_rank

_BEAT, _SUM, _DECISION = "torchtitan_lite/beat/{}", "torchtitan_lite/sum", "torchtitan_lite/decision"
_FOLLOWS = b"--- this process ends because another one did\n"


@dataclass(frozen=True)
class Beat:
    """What a rank publishes at each interval."""

    number: int = 0  # increases, so that a frozen process is noticed
    place: str = "starting"  # step and phase of the main thread
    moved: int = 0
    doing: list[str] = field(default_factory=list)
    working: list[str] = field(default_factory=list)


@contextlib.contextmanager
def explained(world: World, explain: Callable[[RuntimeError], str] | None = None) -> Iterator[None]:
    """Turn a communication error in this context into a StuckError. Without `explain`: before there is a Watchdog."""
    try:
        yield
    except RuntimeError as error:
        if world.world_size == 1:
            raise
        if not is_lost(error):
            raise
        stuck = StuckError(explain(error) if explain else explain_start(error, world.rank))
        stuck.follows = is_gone(error)
        raise stuck from error


class Watchdog:
    """Watches the steps, saves and loads of this rank until `close`."""

    def __init__(self, folder: Path, world: World, timeout_minutes: float) -> None:
        self._world = world
        self._timeout_s = 60 * timeout_minutes
        self._at = Place()
        assert world.store is not None
        self._store = world.store
        self.on_abort: Callable[[str], Any] = lambda _: None  # called with the reason before the process ends
        folder = folder / "stacks"
        self._path = folder / f"rank-{world.rank}.txt"
        try:
            folder.mkdir(exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{self._path} can't be written: {error.strerror or error}") from None
        # stacks of earlier attempts stay, because error messages refer to this file
        self._before = self._path.stat().st_size
        with contextlib.suppress(OSError):  # a full disk
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            self._file.write(f"--- attempt of {started}, process {os.getpid()}\n".encode())
        self._size = self._path.stat().st_size
        # The kernel drops this lock when the process ends, by which others notice. `close` keeps it.
        lock = os.dup(self._file.fileno())
        weakref.finalize(self, os.close, lock)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

        limit_group_timeouts(timeout_minutes)
        self._interval_s = min(10.0, self._timeout_s / 40)
        self._silent_s = max(self._timeout_s / 4, 3 * self._interval_s)  # a rank without beats for so long is silent
        self._closed = threading.Event()
        self._beats: dict[int, Beat] = {}  # on rank 0: the newest of each rank
        self._last_beat_at: dict[int, float] = {}  # on rank 0: when each rank's newest beat came
        self._sum, self._decision = 0, ""  # as rank 0 has published them
        self._silent: dict[int, float] = {}  # the same: the seconds since the newest beat of each silent rank
        self._rank0_beat, self._rank0_beat_at = 0, time.monotonic()  # on others: the number of rank 0's newest beat
        self._own_store = self._store.clone() if hasattr(self._store, "clone") else self._store
        self._steps = StepTimer(world, self._own_store, self._timeout_s, self._interval_s, folder)
        for target in (self._exchange, self._check):
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True).start()

    # --- steps --------------------------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        """A step begins."""
        self._reach(Place(number, 0))
        # before the other ranks time out and torchrun kills this process
        faulthandler.dump_traceback_later(0.9 * self._timeout_s, repeat=False, file=self._file)

    def computing(self) -> None:
        """This rank has its batch."""
        self._reach(Place(self._at.step, 1))

    def forward(self) -> None:
        """A forward pass begins."""
        self._reach(self._at._replace(passes=self._at.passes + 1))

    def _reach(self, at: Place) -> None:
        self._at = at
        if self._world.world_size > 1:
            self._steps.publish(self._store, at)

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

    def explained(self) -> contextlib.AbstractContextManager[None]:
        """Turn a communication error in this context into a StuckError with the step and the ranks that were behind."""
        return explained(self._world, self._explain)

    def _explain(self, error: RuntimeError) -> str:
        ended = self._ended() if is_gone(error) else ()
        message = self._steps.explain(error, self._at, self._all_silent(), ended)
        if self._world.rank:  # for rank 0, which may be gone
            self.on_abort(message)
        with contextlib.suppress(OSError):  # for `_has_ended` of others; `close` keeps the file
            self._file.write(_FOLLOWS)
        return message

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """All ranks load something in this context, without a time limit, and synchronise at the end."""
        with self.explained(), progress.loading(what):
            yield
            dist.barrier(group=self._world.untimed)  # training has a time limit

    # --- saves and loads ----------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Publish this rank's beat and decision, and read the sum and others' decisions. Rank 0 makes the sum."""
        number = 0
        with contextlib.suppress(RuntimeError):  # the store is gone: the run is ending
            while not self._closed.wait(self._interval_s):
                number += 1
                beat = self._beat(number)
                if self._decision:
                    self._own_store.set(_DECISION, self._decision)
                elif self._own_store.check([_DECISION]):
                    self._decision = self._own_store.get(_DECISION).decode()
                if self._world.rank == 0:
                    self._collect(beat)
                    self._own_store.set(_SUM, json.dumps([number, self._sum, list(self._silent.items())]))
                    continue
                self._own_store.set(_BEAT.format(self._world.rank), json.dumps(asdict(beat)))
                if self._own_store.check([_SUM]):
                    newest, self._sum, silent = json.loads(self._own_store.get(_SUM))
                    self._silent = {rank: seconds for rank, seconds in silent if rank != self._world.rank}
                    if newest != self._rank0_beat:
                        self._rank0_beat, self._rank0_beat_at = newest, time.monotonic()

    def _beat(self, number: int = 0) -> Beat:
        now = progress.current()
        return Beat(number, str(self._at), moved=now.moved, doing=now.doing, working=now.working)

    def _collect(self, own: Beat) -> None:
        """Read all beats, and sum their bytes."""
        now = time.monotonic()
        beats = {0: own}
        others = [
            rank
            for rank in range(1, self._world.world_size)
            if rank in self._beats or self._own_store.check([_BEAT.format(rank)])
        ]
        texts = self._own_store.multi_get([_BEAT.format(rank) for rank in others]) if others else []
        beats |= {rank: Beat(**json.loads(text)) for rank, text in zip(others, texts, strict=True)}
        for rank, beat in beats.items():
            if rank not in self._beats or self._beats[rank].number != beat.number:
                self._last_beat_at[rank] = now
        self._beats = beats
        self._sum = sum(beat.moved for beat in beats.values())
        quiet = {rank: now - beat_at for rank, beat_at in self._last_beat_at.items()}
        self._silent = {rank: seconds for rank, seconds in quiet.items() if seconds >= self._silent_s}

    def _all_silent(self) -> dict[int, float]:
        """The seconds since the newest beat of each silent rank."""
        if self._world.rank == 0:
            return self._silent
        seconds = time.monotonic() - self._rank0_beat_at
        return ({0: seconds} if seconds >= self._silent_s else {}) | self._silent

    def _ended(self) -> list[int]:
        """The ranks of this machine whose processes have ended, as soon as there is one; [] after two seconds.

        Also [] in a load, when some may not have started, and where locks do not work or the folder is gone.
        """
        if not self._at.step or self._has_ended(self._world.rank):
            return []
        first, end = self._world.rank - local_rank(), time.monotonic() + 2
        others = [r for r in range(first, first + self._world.local_world_size) if r != self._world.rank]
        while others and time.monotonic() < end:  # a killed process closes its connections and files in any order
            if ended := [rank for rank in others if self._has_ended(rank)]:
                return ended
            time.sleep(0.05)
        return []

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank's process has ended, and not because another did: nobody locks its file, or it is removed."""
        try:
            with self._path.with_name(f"rank-{rank}.txt").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return not file.read().endswith(_FOLLOWS)
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _check(self) -> None:
        """End the process when no rank makes progress, or when another one has decided so."""
        quiet_s, last_moved, before = 0.0, (-1, -1), time.monotonic()
        # NCCL aborts the process at the timeout, see hang.py
        patience_s = (0.9 if self._world.device.type == "cuda" else 1) * self._timeout_s
        limit_s = patience_s * (1.25 if self._world.rank else 1)
        while not self._closed.wait(self._interval_s):
            now, own = time.monotonic(), self._beat()
            # the time in which this process was stopped does not count
            quiet_s, before = quiet_s + min(now - before, 2 * self._interval_s), now
            active = own.doing or any(beat.doing for beat in self._beats.values())
            if not active or (own.moved, self._sum) != last_moved:
                quiet_s, last_moved = 0.0, (own.moved, self._sum)
            if self._decision:
                self._abort(self._decision, decided_here=False)
            elif self._world.world_size > 1 and (problem := self._steps.problem(self._at, self._all_silent())):
                self._abort(problem)
            elif quiet_s >= limit_s:
                operation = next((text for beat in (*self._beats.values(), own) for text in beat.doing), "").split(":")[
                    0
                ]
                self._abort(
                    f"{operation}: nothing was written, hashed or read on any rank for {patience_s / 60:g} minutes "
                    f"(run.timeout_minutes). Waited for: {self._waited_for()}. "
                    f"Stacks are in {self._path.parent}; a process that is stopped or was killed writes none"
                )

    def _waited_for(self) -> str:
        """The ranks that others wait for: silent, working, or not taking part. Other ranks only know about rank 0."""
        if self._world.rank:
            return silence(0, time.monotonic() - self._rank0_beat_at, "unknown")
        ranks = []
        for rank in range(self._world.world_size):
            beat = self._beats.get(rank)
            if beat is None:
                ranks.append(f"rank {rank} (not started)")
            elif rank in self._silent:
                ranks.append(silence(rank, self._silent[rank], "; ".join(beat.doing) or beat.place))
            elif beat.working or not beat.doing:
                ranks.append(f"rank {rank} ({'; '.join(beat.working) or beat.place})")
        return ", ".join(ranks) or "all ranks wait for each other"

    def _abort(self, message: str, *, decided_here: bool = True) -> None:
        """Write stacks, status and message, and end this process, whatever its other threads wait for."""
        self._decision = message  # published if it was made here, and the store may end with rank 0
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=self._file)
        reporting = threading.Thread(target=self.on_abort, args=(message,), daemon=True)
        reporting.start()
        reporting.join(timeout=5)  # the file system may hang
        if decided_here or self._world.rank == 0:
            time.sleep(3 * self._interval_s)  # until the others have read it
        report(f"train.py: {message}", local_rank())
        os._exit(StuckError.exit_code)
