"""What a run is doing, from its folder: `python -m torchtitan_lite.status [RUN]`. Without --plan it needs no torch.

run.json has the status that the run has written last. A killed process writes none, so `status_of` compares it with the
lock of the folder, which the kernel releases when rank 0 ends. Every reader of the status uses it.
"""

import argparse
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.config import paths
from torchtitan_lite.errors import ConfigError, UserError, run_cli
from torchtitan_lite.monitoring import goodput
from torchtitan_lite.terminal import counted, duration, size
from torchtitan_lite.tools.records import Records, read_about, read_records

_TAIL = 1 << 20  # bytes of metrics.jsonl that are read
_EVENTS = 3


@dataclass(frozen=True)
class Status:
    """The status of a run.

    Args:
        text: as in run.json, or what is known of a run that has written none at its end.
        active: whether the run trains, or may train: it can't be seen from here.
    """

    text: str
    active: bool


UNKNOWN = Status("unknown", active=False)


def status_of(folder: Path, about: Mapping[str, Any]) -> Status:
    """The status of a run now.

    Args:
        about: the content of run.json.
    """
    status = about.get("status")
    if not isinstance(status, str):
        return UNKNOWN
    if status not in ("starting", "running"):
        starts = "starting" in about and _locked(folder) is True
        return Status("starting" if starts else status, starts)
    locked = _locked(folder)
    if locked:
        return Status("starting" if "starting" in about else status, True)
    age = f"last record {_ago(_last_time(folder, about))}"
    holder = _holder(folder, about)
    if locked is False and holder == socket.gethostname():
        return Status(f"stopped without a word, {age}", False)
    where = f" on {holder}" if holder else ""
    return Status(f"{status}{where} when last seen, {age}", True)


def _holder(folder: Path, about: Mapping[str, Any]) -> str:
    """The machine of rank 0. A power loss or a full disk may have emptied the file, but not the run.json before."""
    try:
        holder = re.search(r" on (.+)$", (folder / ".lock-holder").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        holder = None
    if holder:
        return holder[1]
    machines = about.get("machines")
    return str(machines[0]) if isinstance(machines, list) and machines and "starting" not in about else ""


def _locked(folder: Path) -> bool | None:
    """Whether a process that this machine can see holds the lock of a run; None if that can't be tested.

    A file system may keep locks on each machine: False proves something only on the machine of rank 0. The lock is
    shared and held for an instant, which `run_folder.lock` waits for. Nothing is written.
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


def _last_time(folder: Path, about: Mapping[str, Any]) -> float:
    """When the run wrote its last record, or else run.json; 0 if unknown. Seconds since the epoch."""
    times = [about.get("time"), *(record.get("time") for record in _last_records(folder)[-1:])]
    return max([float(t) for t in times if isinstance(t, int | float)], default=0.0)


def _last_records(folder: Path) -> Records:
    try:
        return read_records(folder / "metrics.jsonl", last_bytes=_TAIL)[0]
    except OSError:
        return []


def _ago(moment: float) -> str:
    return f"{duration(max(time.time() - moment, 0))} ago" if moment > 0 else "at an unknown time"


# --- the command --------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code: 1 if the run has failed or stopped without a word, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.status",
        description="Whether a run is alive, its last record, speed, newest checkpoint, and what happened last.",
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="?", type=paths.argument, help="the run's folder; default: the newest in runs/")
    parser.add_argument("--plan", action="store_true", help="also print the speed that `plan` expects (GPUs; slower)")
    args = parser.parse_args(argv)
    return run_cli("status", lambda: _status(args.run or _newest(), with_plan=args.plan))


def _newest() -> Path:
    runs = {file.parent: file.stat().st_mtime for file in Path("runs").glob("*/run.json")}
    if not runs:
        raise ConfigError("there is no run in runs/: name its folder, e.g. python -m torchtitan_lite.status FOLDER")
    return max(runs, key=lambda folder: runs[folder])


def _status(folder: Path, *, with_plan: bool) -> int:
    try:
        about = read_about(folder)
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not the folder of a run: it has no run.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'run.json'} can't be read: {error}") from None
    status = status_of(folder, about)
    records = _last_records(folder)
    steps = [record for record in records if "loss" in record and record.get("time") is not None]
    n_steps = about["steps"] if type(about.get("steps")) is int else None
    lines = [f"run     {folder}: {status.text}"]
    if steps:
        last = steps[-1]
        loss = last.get("mean_loss", last["loss"])
        lines.append(
            f"step    {last['step']:,}{'' if n_steps is None else f' of {n_steps:,}'}, {_ago(last['time'])}, "
            f"loss {'not finite' if loss is None else f'{loss:.4f}'}"
        )
        lines += _speed(folder, about, steps[-10:], n_steps if status.active else None, with_plan=with_plan)
    else:
        lines.append("step    none has been logged")
    if sums := goodput.newest(about, records):
        lines.append(f"time    {goodput.line(sums)}")
    lines.append(f"saved   {_newest_checkpoint(folder / 'checkpoints')}")
    lines += [f"event   {_ago(when)}: {event}" for when, event in _events(about, records)]
    print("\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines))
    return 1 if status.text.startswith(("failed", "stopped")) else 0


def _speed(
    folder: Path, about: Mapping[str, Any], steps: Records, n_steps: int | None, *, with_plan: bool
) -> list[str]:
    """Tokens per second over the last records, the expected end, and what `plan` expects."""
    rates = sorted(r["tokens_per_second"] for r in steps if r.get("tokens_per_second") is not None)
    if not rates:
        return []
    rate = rates[len(rates) // 2]
    line = f"speed   {rate:,.0f} tokens per second (median of {counted(len(rates), 'record')})"
    first, last = steps[0], steps[-1]
    if n_steps and last["step"] > first["step"]:
        seconds = sum(r.get("seconds") or 0.0 for r in steps[1:])
        left = max(n_steps - last["step"], 0)
        line += f", {duration(seconds / (last['step'] - first['step']) * left)} to the last step"
    return [line, f"plan    {_planned(folder, about, rate)}"] if with_plan else [line]


def _planned(folder: Path, about: Mapping[str, Any], rate: float) -> str:
    """The speed that `plan` expects of this run on its device."""
    from torchtitan_lite.monitoring.mfu import named
    from torchtitan_lite.tools.estimate.planned_run import make_plan
    from torchtitan_lite.tools.estimate.step_time import expected
    from torchtitan_lite.tools.incidents.record import config_of

    name = str(about.get("device", "unknown"))
    device = named(name.removeprefix("cuda "))
    if device is None or not name.startswith("cuda"):
        return f"has no figures of this device: {name}"
    try:
        plan = make_plan(config_of(folder), int(about["world_size"]), device)
    except UserError as error:
        return f"not known: {error}"
    if plan.config.fsdp.cpu_offload:
        return "not known: copies to the host are not estimated"
    if plan.config.speed.float8:
        return "not known: float8 is not estimated"
    planned_rate = plan.layout.tokens_per_step / expected(plan, plan.device or device).total
    return f"expects {planned_rate:,.0f} tokens per second: the run has {rate / planned_rate:.0%}"


def _newest_checkpoint(checkpoints: Path) -> str:
    """The newest checkpoint that is named after its step, and whose files have the sizes of its manifest."""
    damaged = ""
    for folder in sorted(checkpoints.glob("step-*"), key=lambda folder: (len(folder.name), folder.name), reverse=True):
        try:
            manifest = folder / "manifest.json"
            content = json.loads(manifest.read_bytes())
            files = content["files"]
            if folder.name == f"step-{content['step']:08d}" and all(
                (folder / name).stat().st_size == record["bytes"] for name, record in files.items()
            ):
                n_bytes = sum(record["bytes"] for record in files.values())
                return f"{folder.name}, {_ago(manifest.stat().st_mtime)}, {size(n_bytes)}{damaged}"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        damaged = damaged or f"; {folder.name} is damaged: python checkpoint.py verify {checkpoints.parent}"
    return f"no complete checkpoint{damaged}"


def _events(about: Mapping[str, Any], records: Records) -> list[tuple[float, str]]:
    """The last events with their times, newest first: how the run ended, a refused command, spikes, skipped steps."""
    events: list[tuple[Any, str]] = []
    if about.get("status") in ("failed", "preempted", "complete"):
        reason = str(about.get("reason") or "").split("\n")[0]
        events.append((about.get("time"), f"{about['status']} at step {about.get('step')}{reason and f': {reason}'}"))
    if isinstance(refused := about.get("refused"), dict):
        message = str(refused.get("message")).split("\n")[0]
        events.append((refused.get("time"), f"a command was refused, the run is as it was: {message}"))
    for record in records:
        when, step = record.get("time"), record["step"]
        if isinstance(spike := record.get("spike"), dict):
            loss = f" (loss {spike['loss']:.4f})" if isinstance(spike.get("loss"), int | float) else ""
            events.append((when, f"loss spike at step {step}{loss}, action {spike.get('action')}"))
        if "skipped_samples" in record:
            events.append((when, f"step {step} was skipped: not finite"))
    known = [(float(when), event) for when, event in events if isinstance(when, int | float)]
    return sorted(known, reverse=True)[:_EVENTS]
