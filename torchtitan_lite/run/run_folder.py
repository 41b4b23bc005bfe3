"""The run folder: its lock, run.json with the newest status, and the attempt's lines in attempts.jsonl."""

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli
import torch
from filelock import FileLock, Timeout

from torchtitan_lite import LAUNCHED, __version__
from torchtitan_lite.config.toml import Loaded, to_toml
from torchtitan_lite.distributed.exchange import on_rank0
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.errors import BusyError, ConfigError
from torchtitan_lite.files import write_durably
from torchtitan_lite.run import attempts
from torchtitan_lite.terminal import print_line

CODE = Path(__file__).parents[2]
JOINING = ".joining"  # exists while a process of the same job waits for the lock
JOINS = "another machine of the job waits"  # the reason why an attempt then ends


def require_writable(folder: Path) -> None:
    """Check that the folder, or its existing parent, can be written. `lock` makes it, when the data is prepared."""
    where = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not (where.is_dir() and os.access(where, os.W_OK | os.X_OK)):
        raise ConfigError(f"run.out_dir: {folder} can't be written: {where} is not a folder that this user may change")


def job() -> str:
    """Return torchrun's --rdzv-id, without the number that docs/cluster.md increments when an id was closed.

    "none": each machine has a fixed rank, or there is one process without torchrun.
    """
    return re.sub(r"-\d+$", "", os.environ.get("TORCHELASTIC_RUN_ID", "none"))


def holder(folder: Path) -> str:
    """Return which process locked the folder last, for a message."""
    with contextlib.suppress(OSError):
        return (folder / ".lock-holder").read_text() or "another process"
    return "another process"


def is_of_another_job(by: str) -> bool:
    """Return whether a `holder` is known to be of another job: by torchrun's --rdzv-id, else only on this machine."""
    return by.endswith(f" on {socket.gethostname()}") if job() == "none" else not by.endswith(f", job {job()}")


def in_use(folder: Path, by: str) -> str:
    """Return the message for a folder that a `holder` of another job has locked."""
    return f"{folder} is being used by {by}; wait for it, or choose another --run.name=NAME"


def lock(folder: Path) -> FileLock:
    """Lock the folder on rank 0 for as long as the returned object lives, so that only one run writes to it.

    torchrun drops a machine that did not answer for some seconds, and starts the others without it. If the machine
    still trains, it holds the lock: it is asked to save and end, and then starts again together with the others.

    Raises:
        BusyError: on every rank: a process of a different job holds the lock, or locking fails.
    """
    held = FileLock(folder / ".lock", timeout=0.5)  # a reader of the status may be testing it (tools/status.py)
    me = f"process {os.getpid()} on {socket.gethostname()}" + (f", job {job()}" if job() != "none" else "")

    def acquire() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.acquire()
        except Timeout:
            by = holder(folder)
            asked = [attempt.end_time for attempt in attempts.read(folder) if attempt.reason == JOINS]
            starts_again = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            # two separate torchruns, started by mistake, would displace each other forever
            recently = bool(asked) and time.time() - max(asked) < 300
            if not by.endswith(f", job {job()}") or not starts_again or recently:
                raise BusyError(in_use(folder, by)) from None
            (folder / JOINING).touch()
            print_line(f"note    {folder} is being used by {by}, which is asked to save and start again with this one")
            held.acquire(timeout=-1)
        except (OSError, NotImplementedError) as error:
            raise BusyError(f"{folder / '.lock'} can't be locked: {error}") from None
        with contextlib.suppress(OSError):
            (folder / JOINING).unlink(missing_ok=True)
            (folder / ".lock-holder").write_text(me)  # last: it fails on a full disk

    on_rank0(acquire)
    return held


# --- run.json and attempts.jsonl ----------------------------------------------------------------------------------


def record_start(folder: Path, attempt: Mapping[str, Any]) -> int:
    """Record that an attempt has taken over the folder, durably, on rank 0. Returns its number.

    Args:
        attempt: the fields of attempts.Attempt from `command` to `forked_from`.

    Raises:
        OSError: the attempt is not recorded.
    """
    number = max((earlier.attempt for earlier in attempts.read(folder)), default=0) + 1
    attempts.add(folder, {"attempt": number, "time": round(LAUNCHED, 3), **attempt})
    _write(folder, number, "running", attempt["step"], "")
    return number


def record_end(
    folder: Path, process: Process, attempt: int, status: str, step: int, reason: str = "", repeats: bool = False
) -> None:
    """Record how an attempt ended: "complete", "preempted" or "failed". Refused attempts have no record.

    Rank 0 records it. Other ranks record a failure if rank 0, which may be gone, has not.

    Args:
        attempt: its number; 0: the attempt has not taken over the folder.
        repeats: whether the same config and code would fail again, see `why_not_again`.
    """
    if not attempt or (process.rank and status != "failed"):
        return
    about = attempts.newest_status(folder)
    if process.rank and (about.get("attempt"), about.get("status")) != (attempt, "running"):
        return
    with contextlib.suppress(OSError):  # a full disk
        ended = {"ended": status, "last_step": step, "reason": reason, "end_time": round(time.time(), 3)}
        attempts.add(folder, {"attempt": attempt, **ended})
    _write(folder, attempt, status, step, reason, repeats)


def why_not_again(loaded: Loaded, folder: Path) -> str:
    """Return why this attempt is refused: the last one, with the same config and code, failed for good; else empty.

    Args:
        folder: of the run, or a copy.
    """
    about = attempts.newest_status(folder)
    if (
        loaded.retry
        or not about.get("repeats")
        or [last.git for last in attempts.read(folder)[-1:]] != [git_state(CODE)]
    ):
        return ""
    if tomli.loads((folder / "config.toml").read_text()) != tomli.loads(to_toml(loaded.written or loaded.config)):
        return ""
    return (
        f"the last attempt had the same config and code, and failed: {about['reason'].splitlines()[0]}\n  Change the "
        "config, commit a change of the code, or add --retry to try again"
    )


def _write(folder: Path, attempt: int, status: str, step: int, reason: str, repeats: bool = False) -> None:
    """Write run.json. A full disk does not stop training."""
    with contextlib.suppress(OSError):
        records = attempts.records(folder)
        about = {
            **{"format_version": attempts.FORMAT_VERSION, "attempt": attempt, "status": status},
            **{"step": step, "reason": reason, "repeats": repeats, "time": round(time.time(), 3)},
            "goodput": round(attempts.goodput(attempts.read(folder), records)[0], 4),
            **{"host": socket.gethostname(), "last_record": attempts.last_record(records)},
        }
        write_durably(folder / "run.json", (json.dumps(about, indent=2) + "\n").encode())


def facts(process: Process, hosts: Sequence[str]) -> dict[str, Any]:
    """Return how an attempt was started: command, code, versions, hosts, device."""
    device = torch.cuda.get_device_name(process.device) if process.device.type == "cuda" else platform.processor()
    return {
        "command": sys.argv,
        "git": git_state(CODE),
        "versions": {"torchtitan_lite": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": f"{process.device.type} {device}".strip(),
        "hosts": hosts,
        "world_size": process.world_size,
    }


def git_state(folder: Path) -> dict[str, Any]:
    """Return the commit, and whether tracked files differ; empty if the code is not a git repository."""
    try:
        words = [
            "git",
            "-C",
            str(folder),
            "--git-dir=.git",
            "describe",
            "--always",
            "--abbrev=40",
            "--exclude=*",
            "--dirty",
        ]
        state = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        return {"commit": state.removesuffix("-dirty"), "dirty": state.endswith("-dirty")}
    except (OSError, subprocess.SubprocessError):
        return {}
