"""A coordinator and machines of `python -m torchtitan_lite.tools.elastic`, as processes of this machine."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.helpers import HANGS_S, ROOT

SECRET = "0123456789abcdef" * 4
ELASTIC = [sys.executable, "-m", "torchtitan_lite.tools.elastic"]


def until(condition: Callable[[], Any], what: str, seconds: float = HANGS_S) -> Any:
    """Wait for a condition. The time limit only ends what hangs."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)
    return result


class Machines:
    """A coordinator, and machines by name.

    Args:
        folder: for what they print: coordinator.txt, and a file for each machine.
        command: what they run.
        port: of a coordinator that is started later; 0: it is started at once, on a free one.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], *options: str, env: Mapping[str, str] | None = None, port: int = 0
    ) -> None:
        self._folder, self.command, self._env = folder, command, {"TORCHTITAN_LITE_SECRET": SECRET, **(env or {})}
        self._options = options
        self.alive: dict[str, subprocess.Popen[bytes]] = {}
        self.host, self.port = "127.0.0.1", port
        if not port:
            self.coordinate()

    def coordinate(self) -> None:
        """Start the coordinator, the second time on the same port."""
        before = self.said().count("on port ")
        self.coordinator = self._start("coordinator", "coordinate", str(self.port), *self._options)
        until(lambda: self.said().count("on port ") > before, "the coordinator listens")
        self.port = int(re.findall(r"on port (\d+)", self.said())[-1])

    def join(
        self, name: str, *options: str, command: Sequence[str] | None = None, entry: Sequence[str] = ELASTIC
    ) -> None:
        """Add a machine."""
        what = ["--name", name, *options, f"{self.host}:{self.port}", *(command or self.command)]
        self.alive[name] = self._start(name, "join", *what, entry=entry)

    def kill(self, name: str) -> None:
        """SIGKILL for everything on a machine."""
        machine = self.alive.pop(name)
        machine.kill()  # its processes end with it: the kernel kills them
        machine.wait(HANGS_S)

    def leave(self, name: str) -> int:
        """The exit code of a machine that is told to leave."""
        machine = self.alive.pop(name)
        machine.send_signal(signal.SIGTERM)
        return machine.wait(HANGS_S)

    def said(self, name: str = "coordinator") -> str:
        """What a process has printed."""
        file = self._folder / f"{name}.txt"
        return file.read_text() if file.exists() else ""

    def worlds(self) -> int:
        """How many worlds have been started."""
        return len(re.findall(r"world \d+: ", self.said()))

    def codes(self) -> dict[str, int]:
        """The exit codes of all, when they have ended."""
        return {name: process.wait(HANGS_S) for name, process in self._running().items()}

    def close(self) -> None:
        for process in self._running().values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(HANGS_S)

    def _running(self) -> dict[str, subprocess.Popen[bytes]]:
        return {"coordinator": self.coordinator} | self.alive

    def _start(self, name: str, *words: str, entry: Sequence[str] = ELASTIC) -> subprocess.Popen[bytes]:
        env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | self._env
        with (self._folder / f"{name}.txt").open("ab") as out:
            return subprocess.Popen([*entry, *words], cwd=ROOT, env=env, stdout=out, stderr=out)
