"""The watchdog: a rank that hangs is noticed and named, and every rank ends with its stacks written.

1. Steps. The groups that training uses give up after `run.timeout_minutes` (process_group.limit_waiting). Shortly
   before, a rank whose step takes that long writes its stacks. Each rank tells the store where it is, so that whoever
   waited can say for whom (`explained`).
2. Saves, loads and verifications take as long as there are bytes, so they are judged by progress.py and not by time.
   Their collectives wait without limit (process_group.patient_group). A thread of each rank publishes how many bytes it
   has moved; rank 0's adds them up, and publishes the sum. Another thread looks at it, without touching the store:

       as long as bytes move on any rank                 nobody gives up
       none moved for run.timeout_minutes                rank 0 names the ranks that were waited for, all ranks end
       rank 0 itself is silent for a quarter more        every rank ends by itself, and names rank 0

   The main threads may be blocked in a collective or by a disk, so these threads end the process.
"""

import contextlib
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.distributed.process_group import World, env_int, limit_group_timeouts, print_once
from torchtitan_lite.errors import ConfigError, StuckError
from torchtitan_lite.monitoring import run_folder

_AT, _BEAT, _SUM = "torchtitan_lite/at/{}", "torchtitan_lite/beat/{}", "torchtitan_lite/sum"
_SILENT = "rank 0 (its process or its machine does not answer)"
_PHASES = "fetching its batch", "computing"

# How gloo, the store and NCCL say that another process is gone or late. (Most errors of the latter two are DistErrors.)
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


def is_lost(error: RuntimeError) -> bool:
    """Whether an error says that another rank is gone, or was waited for too long."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(phrase in text for phrase in _LOST)


@dataclass(frozen=True)
class Beat:
    """What a rank publishes."""

    number: int = 0  # of its beats, so that a process that stands still is seen
    place: str = "starting"  # where its main thread is
    moved: int = 0
    doing: list[str] = field(default_factory=list)
    working: list[str] = field(default_factory=list)


class Watchdog:
    """Watches the steps, saves and loads of this rank, from now until `close`."""

    def __init__(self, folder: Path, world: World, timeout_minutes: float) -> None:
        self._world = world
        self._timeout_s = 60 * timeout_minutes
        self._at = 0, 0  # step, and index of the phase
        self._store = dist.distributed_c10d._get_default_store()  # the only way to the store that torchrun made
        self._run = folder
        # told why the run ends
        self.on_abort: Callable[[str], Any] = lambda why: run_folder.write_status(folder, world, "failed", None, why)
        folder = folder / "stacks"
        self._path = folder / f"rank-{world.rank}.txt"
        try:
            folder.mkdir(exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"{self._path} can't be written: {error.strerror or error}") from None
        # stacks of earlier attempts stay: an error message may have sent somebody here
        self._before = self._path.stat().st_size
        with contextlib.suppress(OSError):  # a full disk
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            self._file.write(f"--- attempt of {started}, process {os.getpid()}\n".encode())
        self._size = self._path.stat().st_size

        limit_group_timeouts(timeout_minutes)
        self._interval_s = min(10.0, self._timeout_s / 20)
        self._closed = threading.Event()
        self._beats: dict[int, Beat] = {}  # on rank 0: the newest of each rank
        self._quiet_ranks: dict[int, float] = {}  # on rank 0: when each rank's beats stopped
        self._sum, self._decision = 0, ""  # as rank 0 has published them
        self._own_store = self._store.clone() if hasattr(self._store, "clone") else self._store
        for target in (self._talk, self._look):
            threading.Thread(target=target, name=f"watchdog {target.__name__}", daemon=True).start()

    # --- steps --------------------------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        """A step begins."""
        self._reach(number, 0)
        # a little earlier than the others give up and torchrun ends this process
        faulthandler.dump_traceback_later(0.9 * self._timeout_s, repeat=False, file=self._file)

    def computing(self) -> None:
        """This rank has its batch."""
        self._reach(self._at[0], 1)

    def _reach(self, step: int, phase: int) -> None:
        self._at = step, phase
        self._store.set(_AT.format(self._world.rank), f"{step} {phase}")

    def close(self) -> None:
        """Nothing more is watched."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):  # or it is gone
            if self._path.stat().st_size == self._size:
                os.ftruncate(self._file.fileno(), self._before)  # no stack was written
        self._file.close()
        with contextlib.suppress(OSError):  # the last rank takes the folder away; or it is gone
            if not self._path.stat().st_size:
                self._path.unlink()
                self._path.parent.rmdir()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """An error of the communication in here says at which step, and which ranks were behind.

        Raises:
            StuckError: another rank was lost, or kept this one waiting for too long.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_lost(error):
                raise
            behind = [f"rank {rank} ({_place(at)})" for rank, at in self._others() if at < self._at]
            who = f"behind: {', '.join(behind)}" if behind else "all ranks had reached it"
            raise StuckError(
                f"rank {self._world.rank}, step {self._at[0]}: lost the other ranks, or waited for "
                f"{self._timeout_s / 60:g} minutes (run.timeout_minutes); {who}. "
                f"Stacks of processes that took too long are in {self._path.parent}. {str(error).splitlines()[0]}"
            ) from error

    def _others(self) -> list[tuple[int, tuple[int, int]]]:
        """Each rank, and what it has reached."""
        found = []
        with contextlib.suppress(RuntimeError):  # the store may be gone with its process
            self._store.set_timeout(timedelta(seconds=5))
            for rank in range(self._world.world_size):
                step, phase = self._store.get(_AT.format(rank)).decode().split()
                found.append((rank, (int(step), int(phase))))
        return found

    @contextlib.contextmanager
    def loading(self, what: str) -> Iterator[None]:
        """All ranks load something in here, however long it takes, and wait for each other at the end."""
        with self.explained(), progress.loading(what):
            yield
            dist.barrier(group=self._world.untimed)  # one may have had more to read, and training does not wait as long

    # --- saves and loads ----------------------------------------------------------------------------------------

    def _talk(self) -> None:
        """Publish this rank's beat, and read what rank 0 has published; on rank 0 the other way round."""
        number = 0
        with contextlib.suppress(RuntimeError):  # the store has ended: so have the other ranks, or soon this one
            while not self._closed.wait(self._interval_s):
                number += 1
                beat = self._beat(number)
                if self._world.rank == 0:
                    self._collect(beat)
                    self._own_store.set(_SUM, json.dumps([self._sum, self._decision]))
                    continue
                self._own_store.set(_BEAT.format(self._world.rank), json.dumps(asdict(beat)))
                if self._own_store.check([_SUM]):
                    self._sum, self._decision = json.loads(self._own_store.get(_SUM))

    def _beat(self, number: int = 0) -> Beat:
        return Beat(number, _place(self._at), **asdict(progress.current()))

    def _collect(self, mine: Beat) -> None:
        """Read all beats, and add them up."""
        now = time.monotonic()
        beats = {0: mine}
        others = [rank for rank in range(1, self._world.world_size) if rank in self._beats]
        others += [
            rank
            for rank in range(1, self._world.world_size)
            if rank not in self._beats and self._own_store.check([_BEAT.format(rank)])
        ]
        texts = self._own_store.multi_get([_BEAT.format(rank) for rank in others]) if others else []
        beats |= {rank: Beat(**json.loads(text)) for rank, text in zip(others, texts, strict=True)}
        for rank, beat in beats.items():
            if rank not in self._beats or self._beats[rank].number != beat.number:
                self._quiet_ranks[rank] = now
        self._beats = beats
        self._sum = sum(beat.moved for beat in beats.values())

    def _look(self) -> None:
        """End the process when no rank gets on, or when rank 0 has said so."""
        quiet_s, last, before = 0.0, (-1, -1), time.monotonic()
        first = self._world.rank == 0
        limit_s = self._timeout_s * (1 if first else 1.25)
        while not self._closed.wait(self._interval_s):
            now, mine = time.monotonic(), self._beat()
            # a process that was stopped for an hour has not waited for an hour
            quiet_s, before = quiet_s + min(now - before, 2 * self._interval_s), now
            active = mine.doing or any(beat.doing for beat in self._beats.values())
            if not active or (mine.moved, self._sum) != last:
                quiet_s, last = 0.0, (mine.moved, self._sum)
            if self._decision:
                self._leave(self._decision)
            elif quiet_s >= limit_s:
                what = next((text for beat in (*self._beats.values(), mine) for text in beat.doing), "").split(":")[0]
                self._leave(
                    f"{what}: nothing was written, hashed or read on any rank for {self._timeout_s / 60:g} minutes "
                    f"(run.timeout_minutes). Waited for: {self._waited_for() if first else _SILENT}. "
                    f"Stacks are in {self._path.parent}"
                )

    def _waited_for(self) -> str:
        """The ranks that do something which others wait for, or nothing of the kind."""
        silent_since = time.monotonic() - max(self._timeout_s / 2, 3 * self._interval_s)
        found = []
        for rank in range(self._world.world_size):
            beat = self._beats.get(rank)
            if beat is None:
                found.append(f"rank {rank} (not started)")
            elif self._quiet_ranks[rank] < silent_since:
                where = "; ".join(beat.doing) or beat.place
                found.append(f"rank {rank} (its process or its machine does not answer; last seen {where})")
            elif beat.working or not beat.doing:
                found.append(f"rank {rank} ({'; '.join(beat.working) or beat.place})")
        return ", ".join(found) or "all ranks wait for each other"

    def _leave(self, message: str) -> None:
        """Stacks, status, message, and the end of this process, whatever its other threads wait for."""
        self._decision = message  # rank 0 publishes it; the store that the others talk to may end with rank 0
        if self._world.rank != 0:
            self._closed.set()
        with contextlib.suppress(OSError, ValueError):
            faulthandler.dump_traceback(file=self._file)
        telling = threading.Thread(target=self._tell, args=(message,), daemon=True)
        telling.start()
        telling.join(timeout=5)  # the file system may be what hangs
        if self._world.rank == 0:
            time.sleep(3 * self._interval_s)  # until the others have read it
        print_once(f"train.py: {message}", env_int("LOCAL_RANK", 0))
        os._exit(StuckError.exit_code)

    def _tell(self, message: str) -> None:
        self.on_abort(message)
        if self._world.rank == 1 and _SILENT in message:
            run_folder.write_status(self._run, replace(self._world, rank=0), "failed", self._at[0], message)


def _place(at: tuple[int, int]) -> str:
    return f"step {at[0]}, {_PHASES[at[1]]}" if at[0] else "starting"
