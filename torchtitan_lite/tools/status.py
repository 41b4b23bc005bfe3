"""Shows the status of a run, from its folder: `python -m torchtitan_lite.status RUN`. Needs no torch.

run.json has the newest status. A killed process does not update it, so `status_of` also tests the folder's lock, which
the kernel releases when rank 0 ends. Every reader of the status uses `status_of`.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite import commands
from torchtitan_lite.config import paths
from torchtitan_lite.run import attempts
from torchtitan_lite.terminal import duration


@dataclass(frozen=True)
class Status:
    """The status of a run.

    Args:
        text: the status in run.json, or what is known if the run ended without writing it.
        active: whether the run trains, or may train out of sight of this machine.
    """

    text: str
    active: bool


def status_of(folder: Path, about: dict[str, Any], records: Sequence[dict[str, Any]]) -> Status:
    """Return the current status of a run, from the contents of run.json and metrics.jsonl (the records that count)."""
    status, locked = about["status"], is_locked(folder)
    if locked or status != "running":
        return Status("starting" if locked and status != "running" else status, bool(locked))
    times = [about["time"], *(record["time"] for record in records[-1:])]
    age = f"last record {_ago(max(times))}"
    host = attempts.read(folder)[-1].hosts[0]
    if locked is False and host == socket.gethostname():
        return Status(f"stopped unexpectedly, {age}", False)
    return Status(f"running on {host} when last seen, {age}", True)


def is_locked(folder: Path) -> bool | None:
    """Return whether a process visible to this machine holds the run's lock; None if that can't be tested.

    A file system may keep locks per machine, so False is reliable only on rank 0's machine. The test holds a shared
    lock for an instant, which `run_folder.lock` waits for. Writes nothing.
    """
    try:
        descriptor = os.open(folder / ".lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _ago(moment: float) -> str:
    return f"{duration(max(time.time() - moment, 0))} ago"


OPTIONS: commands.Options = {
    "run": {"type": paths.expand, "metavar": "RUN", "help": "the folder of a run"},
    "--json": {"action": "store_true", "help": "print one line of JSON (docs/watching.md)"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the status. Returns the exit code: 1 if the run has failed or stopped unexpectedly, else 0."""
    text = "Whether a run is alive, its step, loss and speed, and how long ago its last record was."
    return commands.run("status", argv, OPTIONS, lambda args: _status(args.run, args.json), description=text)


def _status(folder: Path, as_json: bool) -> int:
    about, history = attempts.of_run(folder)
    records = attempts.records(folder)
    status = status_of(folder, about, records)
    reason = "" if status.active else about["reason"].split("\n")[0]
    waits = f"; {_ago(about['time'])}, and no attempt has begun since" if status.text == "preempted" else ""
    name = (folder / ".bucket").read_text() if (folder / ".bucket").is_file() else folder
    lines = [f"run     {name}: {status.text}{reason and f': {reason}'}{waits}"]
    lines.append(f"ranks   {history[-1].world_size} on {', '.join(history[-1].hosts)}")
    named = {file.parent.name: file.parent for file in (folder / "checkpoints").glob("step-*/manifest.json")}
    saved = {int(name[5:]): each.stat().st_mtime for name, each in named.items() if name[5:].isdecimal()}
    last, best = attempts.last_record(records), attempts.best_step(folder, [*saved])
    n_steps = (attempts.that_count(history) or history)[-1].config["train.steps"]
    if last:
        loss = "not finite" if last["loss"] is None else f"{last['loss']:.4f}"
        lines.append(f"step    {last['step']:,} of {n_steps:,}, {_ago(last['time'])}, loss {loss}")
        lines += [f"saved   step {max(saved):,}, {_ago(saved[max(saved)])}"] if saved and name == folder else []
        uploads = [record for record in records if {"upload_s", "upload_error"} & record.keys()]
        for record in uploads[-1:]:
            error = f" is not in the bucket: {record['upload_error']}" if "upload_error" in record else ""
            lines.append(f"bucket  step {record['step']:,}{error}, {_ago(record['time'])}")
        lines += [] if best is None else [f"best    the checkpoint of step {best:,}, by validation loss"]
        lines.append(f"speed   {last['tokens_per_second']:,.0f} tokens per second, {attempts.goodput_line(folder)}")
    else:
        lines.append("step    none has been logged")
    if as_json:
        now = {
            "run": str(folder),
            "status": status.text.split()[0],
            "text": status.text,
            "active": status.active,
            "host": history[-1].hosts[0],
            "world_size": history[-1].world_size,
            "steps": n_steps,
            "last_record": last,
            "saved": max(saved, default=None),
            "best": best,
            "goodput": round(attempts.goodput(history, records)[0], 4),
        }
        lines = [json.dumps(about | now)]
    print("\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines))
    return 1 if status.text.startswith(("failed", "stopped")) else 0
