"""A rank that hangs is noticed, and leaves something to look at.

Collectives give up after `run.timeout_minutes`. Before they do, every process whose step takes that long writes the
stack of each of its threads into the run's folder; and every rank tells the store where it is, so that whoever waited
can say for whom.
"""

import contextlib
import faulthandler
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtitan_lite.distributed import World
from torchtitan_lite.errors import StuckError

_KEY = "torchtitan_lite/step/{}"


class Watch:
    """Watches the steps of this rank."""

    def __init__(self, folder: Path, world: World, timeout_minutes: float) -> None:
        self._world = world
        self._timeout_s = 60 * timeout_minutes
        self._step = 0
        self._store = dist.distributed_c10d._get_default_store()  # the only way to the store that torchrun made
        folder = folder / "stacks"
        folder.mkdir(exist_ok=True)
        self._path = folder / f"rank-{world.rank}.txt"
        self._file = self._path.open("w", encoding="utf-8")

    def step(self, number: int) -> None:
        """A step begins."""
        self._step = number
        self._store.set(_KEY.format(self._world.rank), str(number))
        # a little earlier than the others give up and torchrun ends this process
        faulthandler.dump_traceback_later(0.9 * self._timeout_s, repeat=False, file=self._file)

    def close(self) -> None:
        """Nothing more is watched."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()  # the last rank takes the folder away

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
            behind = [f"rank {rank} (step {at})" for rank, at in self._others() if at < self._step]
            who = f"behind: {', '.join(behind)}" if behind else "all ranks had reached it"
            raise StuckError(
                f"rank {self._world.rank}, step {self._step}: lost the other ranks, or waited for "
                f"{self._timeout_s / 60:g} minutes (run.timeout_minutes); {who}. "
                f"Stacks of processes that took too long are in {self._path.parent}. {str(error).splitlines()[0]}"
            ) from error

    def _others(self) -> list[tuple[int, int]]:
        found = []
        with contextlib.suppress(RuntimeError):  # the store may be gone with its process
            self._store.set_timeout(timedelta(seconds=5))
            for rank in range(self._world.world_size):
                found.append((rank, int(self._store.get(_KEY.format(rank)))))
        return found
