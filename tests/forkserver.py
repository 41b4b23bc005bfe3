"""Runs of train.py as forked ranks: torch is imported once, so that a run of the tests takes a second, not ten.

Apart from that they are what torchrun starts: the same environment variables, a store on a free port, signals, and an
end for all as soon as one has failed. `python -m tests.forkserver` reads a request per line, and answers with a line.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Ranks:
    """The processes of one run, forked from this one.

    Args:
        n: how many; 1 is what plain python would start, without a launcher's variables.
        entry: the module whose `main(argv)` each of them is.
        fault: of tests/faults/worker.py.
        out, err: files to which the ranks append what they say.
    """

    def __init__(
        self,
        n: int,
        argv: Sequence[str],
        out: Path,
        err: Path,
        env: Mapping[str, str] | None = None,
        entry: str = "train",
        fault: str = "",
    ) -> None:
        given = {"OMP_NUM_THREADS": "1"} | dict(env or {})
        together = {
            "WORLD_SIZE": str(n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self.codes: dict[int, int] = {}
        self.pids = []
        for rank in range(n):
            launched = together | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if n > 1 else {}
            self.pids.append(_fork(given | launched, argv, out, err, entry, fault))

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

    def finish(self, seconds: float) -> None:
        """Wait for all; when one fails, or the time is over, end the others as torchrun does."""
        end = time.monotonic() + seconds
        while self.running() and not any(self.codes.values()):
            if time.monotonic() > end:
                break
            time.sleep(0.005)
        for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 20.0)):  # torchrun's first is 30
            for rank in self.running():
                self.send(rank, number)
            if self.wait(patience):
                return


def _fork(env: Mapping[str, str], argv: Sequence[str], out: Path, err: Path, entry: str, fault: str) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        for name in _OF_LAUNCHERS:
            os.environ.pop(name, None)
        os.environ.update(env)
        os.chdir(ROOT)
        for number, path in ((1, out), (2, err)):
            with path.open("a") as stream:
                os.dup2(stream.fileno(), number)
        from torchtitan_lite.distributed import leave

        if fault:
            from tests.faults import worker

            worker.install(fault)
        code = importlib.import_module(entry).main(argv)
        leave(code)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Server:
    """The process that has torch, from the tests' side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver"],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(
        self, n: int, argv: Sequence[str], env: Mapping[str, str], entry: str, fault: str, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """A module's `main` on n ranks, and what they said. Of several ranks the return code is 1 if one failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            request = {"n": n, "argv": argv, "out": str(out), "err": str(err), "env": env}
            self._process.stdin.write(json.dumps(request | {"entry": entry, "fault": fault, "timeout": timeout}) + "\n")
            self._process.stdin.flush()
            codes = json.loads(self._process.stdout.readline())
            said = [path.read_text() if path.exists() else "" for path in (out, err)]
        code = codes[0] if n == 1 else int(any(codes))
        return subprocess.CompletedProcess(argv, code, *said)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._process.communicate(timeout=10)


def main() -> None:
    """Serve until the input ends."""
    import train  # noqa: F401  # what is imported now, no run has to import

    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        files = Path(request["out"]), Path(request["err"])
        more = {name: request[name] for name in ("env", "entry", "fault")}
        ranks = Ranks(request["n"], request["argv"], *files, **more)
        ranks.finish(request["timeout"])
        print(json.dumps([ranks.codes.get(rank, -9) for rank in range(request["n"])]), flush=True)


if __name__ == "__main__":
    main()
