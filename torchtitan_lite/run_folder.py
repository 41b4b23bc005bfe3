"""The folder of a run: it can be written, and nobody else writes to it."""

import contextlib
import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from torchtitan_lite import __version__
from torchtitan_lite.distributed import World, from_rank0
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.layout import Layout


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


def write_status(folder: Path, world: World, status: str, step: int, reason: str = "", **facts: Any) -> None:
    """Rank 0's run.json: "running", "complete", "preempted" or "failed", at which step, and why.

    Args:
        facts: what else there is to know of this process; it stays until the next one.
    """
    if world.rank != 0:
        return
    file, beside = folder / "run.json", folder / ".run.json"
    if not facts:
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads(file.read_text(encoding="utf-8"))
    now = {"status": status, "step": step, "reason": reason, "time": round(time.time(), 3), "pid": os.getpid()}
    with contextlib.suppress(OSError):  # a full disk does not stop training
        beside.write_text(json.dumps(facts | now, indent=2) + "\n", encoding="utf-8")
        beside.replace(file)


def facts(layout: Layout, world: World, machines: list[str], argv: Sequence[str]) -> dict[str, Any]:
    """What started a run: command, code, versions, machines, mesh."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.processor()
    return {
        "argv": list(argv),
        "git": git_state(Path(__file__).parent.parent),
        "versions": {"torchtitan_lite": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": f"{world.device.type} {device}".strip(),
        "machines": machines,
        "world_size": world.world_size,
        "mesh": {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard},
        "started": round(time.time(), 3),
    }


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and whether files differ from it; empty if the code is not in a git repository of its own."""
    try:
        if not (folder / ".git").exists():
            return {}
        git = ["git", "-C", str(folder)]
        commit, changes = (
            subprocess.run([*git, *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
        return {"commit": commit, "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return {}
