"""The folder of a run: it can be written, and nobody else writes to it."""

import contextlib
import json
import os
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

from torchtitan_lite.distributed import World, from_rank0
from torchtitan_lite.errors import ConfigError


def make(folder: Path) -> None:
    """Make the folder.

    Raises:
        ConfigError: it can't be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.log").touch()
    except OSError as error:
        raise ConfigError(f"run.out_dir: {folder} can't be written: {error}") from None


def lock(folder: Path, world: World) -> FileLock:
    """Hold the folder on rank 0 for as long as the returned lock lives: two runs in one folder would ruin each other.

    Raises:
        ConfigError: on every rank, if another process holds it.
    """
    held = FileLock(folder / ".lock", blocking=False)
    taken = ""
    if world.rank == 0:
        try:
            held.acquire()
            (folder / ".lock-holder").write_text(f"process {os.getpid()} on {socket.gethostname()}")
        except Timeout:
            taken = "another process"
            with contextlib.suppress(OSError):
                taken = (folder / ".lock-holder").read_text()
    if by := from_rank0(taken):
        raise ConfigError(f"{folder} is being used by {by}; wait for it, or choose another --run.name=NAME")
    return held


def write_status(folder: Path, world: World, status: str, step: int, reason: str = "") -> None:
    """Rank 0's run.json: "running", "complete", "preempted" or "failed", at which step, and why."""
    if world.rank == 0:
        content = {"status": status, "step": step, "reason": reason, "time": round(time.time(), 3), "pid": os.getpid()}
        beside = folder / ".run.json"
        with contextlib.suppress(OSError):  # a full disk does not stop training
            beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            beside.replace(folder / "run.json")
