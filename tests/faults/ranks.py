"""Ranks of train.py as forked processes: torch is imported once, so that hundreds of starts take minutes, not hours.

Otherwise they are what torchrun starts: the same environment variables, a store on a free port, signals.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Ranks:
    """The processes of one run."""

    def __init__(self, n: int, argv: Sequence[str], said: Path) -> None:
        env = {
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        self.codes: dict[int, int] = {}
        self.pids = [self._fork(env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, argv, said) for rank in range(n)]

    def _fork(self, env: dict[str, str], argv: Sequence[str], said: Path) -> int:
        if pid := os.fork():
            return pid
        code = 1
        try:
            os.environ.update(env)
            with said.open("a") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            import train

            code = train.main(argv)
            from torchtitan_lite.distributed import leave

            leave(code)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def running(self) -> list[int]:
        """The ranks that have not ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)
        return [rank for rank in range(len(self.pids)) if rank not in self.codes]

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pids[rank], number)

    def kill(self, ranks: Sequence[int]) -> None:
        """SIGKILL, then wait for the rest: they notice, or are ended as torchrun ends them."""
        for rank in ranks:
            if rank in self.running():
                self.send(rank, signal.SIGKILL)
        if not self.wait(1):
            for rank in self.running():
                self.send(rank, signal.SIGKILL)
            assert self.wait(20)

    def wait(self, seconds: float) -> bool:
        """Whether all have ended within so many seconds."""
        end = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True
