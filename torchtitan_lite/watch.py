"""A rank that hangs is noticed, and leaves something to look at.

Collectives give up after `run.timeout_minutes`. Before they do, every process whose step takes that long writes the
stack of each of its threads into the run's folder; and every rank tells the store where it is, so that whoever waited
can say for whom.
"""

import contextlib
import faulthandler
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtitan_lite.distributed import World
from torchtitan_lite.errors import ConfigError, StuckError

_KEY = "torchtitan_lite/at/{}"
_PHASES = "fetching its batch", "computing"


class Watch:
    """Watches the steps of this rank."""

    def __init__(self, folder: Path, world: World, timeout_minutes: float) -> None:
        self._world = world
        self._timeout_s = 60 * timeout_minutes
        self._at = 0, 0  # step, and index of the phase
        self._store = dist.distributed_c10d._get_default_store()  # the only way to the store that torchrun made
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
        self._store.set(_KEY.format(self._world.rank), f"{step} {phase}")

    def close(self) -> None:
        """Nothing more is watched."""
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
            text = str(error).lower()
            if not any(word in text for word in ("timed out", "timeout", "connection", "socket", "peer", "store")):
                raise
            behind = [f"rank {rank} (step {at[0]}, {_PHASES[at[1]]})" for rank, at in self._others() if at < self._at]
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
                step, phase = self._store.get(_KEY.format(rank)).decode().split()
                found.append((rank, (int(step), int(phase))))
        return found
