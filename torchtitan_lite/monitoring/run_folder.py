"""The run folder: its lock, and run.json with the status of the run."""

import contextlib
import errno
import functools
import json
import os
import platform
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from torchtitan_lite import __version__
from torchtitan_lite.config.derive import Layout
from torchtitan_lite.distributed.agreement import from_all_ranks, from_rank0
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import BusyError, ConfigError
from torchtitan_lite.files import write_durably
from torchtitan_lite.monitoring.goodput import of_run
from torchtitan_lite.process import env_int


def make(folder: Path) -> bool:
    """Make the folder, and check that it can be written. Returns whether it did not exist."""
    try:
        try:
            folder.mkdir(parents=True)
            new = True
        except FileExistsError:
            new = False
        (folder / "train.log").touch()
    except OSError as error:
        raise ConfigError(f"run.out_dir: {folder} can't be written: {error}") from None
    return new


@contextlib.contextmanager
def made(folder: Path, wanted: bool = True) -> Iterator[None]:
    """`make` the folder, if wanted. It is removed again if it is new and the block fails before anything is in it.

    Another attempt may prepare its data for this folder meanwhile: `lock` makes it again.
    """
    new = wanted and make(folder)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if new and os.listdir(folder) == ["train.log"] and not (folder / "train.log").stat().st_size:
                (folder / "train.log").unlink()
                folder.rmdir()
        raise


def lock(folder: Path, world: World) -> FileLock:
    """Lock the folder on rank 0 for as long as the returned object lives, so that only one run writes to it.

    Raises:
        BusyError: on every rank: another process holds the lock, or locking fails.
    """
    held = FileLock(folder / ".lock", timeout=0.5)  # a reader of the status may test it just now (tools/status.py)
    problem = ""
    if world.rank == 0:
        holder = folder / ".lock-holder"
        try:
            folder.mkdir(parents=True, exist_ok=True)  # the attempt that had made it may have failed since
            held.acquire()
        except Timeout:
            by = "another process"
            with contextlib.suppress(OSError):
                by = holder.read_text() or by
            problem = f"{folder} is being used by {by}; wait for it, or choose another --run.name=NAME"
        except (OSError, NotImplementedError) as error:
            problem = f"{folder / '.lock'} can't be locked: {error}"
        else:
            with contextlib.suppress(OSError):  # used only in the message above
                holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    if problem := from_rank0(problem):
        raise BusyError(problem)
    return held


# --- run.json ---------------------------------------------------------------------------------------------------


@functools.cache
def attempt_id() -> str:
    """The attempt that wrote a status in run.json. A batch script sets it, to recognise its own."""
    return os.environ.get("TORCHTITAN_LITE_ATTEMPT") or uuid.uuid4().hex


def begin(folder: Path, world: World, resume: str) -> str:
    """Record a new attempt. Returns the effective `checkpoint.resume`, the same on every rank.

    "never" and "step-N" apply once per launch. A restart by torchrun or a requeued Slurm job resumes what was saved
    since ("auto"), but only if an earlier attempt had applied the option: "carried_out" in run.json is written
    together with the first change to the folder.
    """
    counts = from_all_ranks(env_int("TORCHELASTIC_RESTART_COUNT", 0))  # each machine counts its own
    restart, problem = False, ""
    if world.rank == 0:
        try:
            before = read(folder, strict=True)
        except OSError as error:
            before, problem = {}, f"{folder / 'run.json'} can't be read: {error.strerror or error}"
        once = resume == "never" or resume.startswith("step-")
        if once and max(counts) and not before and (folder / "run.json").exists():
            problem = problem or (
                f'{folder / "run.json"} is damaged, and can\'t tell whether checkpoint.resume = "{resume}" was carried '
                "out; go on with --checkpoint.resume=auto, or remove the file to carry it out"
            )
        recorded, launch = before.get("carried_out"), _launch()
        if isinstance(recorded, dict):
            same_job, same_run = (launch[key] and recorded.get(key) == launch[key] for key in launch)
            same_job = same_job and "TORCHTITAN_LITE_WORLD" not in os.environ  # with tools.elastic the secret decides
            restart = recorded.get("resume") == resume and bool(same_job or (same_run and max(counts)))
            if same_run and not max(counts):
                before["carried_out"] = recorded | {"torchelastic_run_id": ""}  # from an earlier launch of this name
        if not problem:
            if before.get("status", "starting") == "starting":  # none has trained here yet
                before |= _now("starting", before.get("step", 0), "")
            # until `accepted`, the status is that of the training before
            _write(folder, before | {"starting": {"time": round(time.time(), 3)} | _attempt()})
    restart, problem = from_rank0((restart, problem))
    if problem:  # without run.json, this attempt could set the wrong checkpoints aside
        raise ConfigError(problem)
    return "auto" if restart else resume


def _launch() -> dict[str, str]:
    """What identifies a launch, for all of its attempts; empty values if unknown."""
    names = {"slurm_job_id": "SLURM_JOB_ID", "torchelastic_run_id": "TORCHELASTIC_RUN_ID"}
    return {key: os.environ.get(name, "") for key, name in names.items()}


def accepted(folder: Path, step: int, resume: str, facts: dict[str, Any]) -> bytes:
    """The run.json of an attempt before its first step. `resume` is what `begin` returned; `facts` are added."""
    carried_out = {"carried_out": read(folder).get("carried_out")}
    if resume == "never" or resume.startswith("step-"):
        carried_out = {"carried_out": {"resume": resume, **_launch()}}
    return _encoded(facts | carried_out | _now("running", step, ""))


def take_over(folder: Path, files: Mapping[str, bytes], set_aside: Callable[[], list[str]]) -> list[str]:
    """Replace files of the run and set checkpoints aside, on rank 0: all of it, or nothing.

    Args:
        files: new contents by name, staged first because writing can fail.
        set_aside: undoes its changes when it fails.
    """
    staged = {name: folder / f".{name}.new" for name in files}
    try:
        for name, content in files.items():
            try:
                if (folder / name).is_dir():
                    raise IsADirectoryError(errno.EISDIR, "it is a folder")
                write_durably(staged[name], content)
            except OSError as error:
                raise ConfigError(f"{folder / name} can't be written: {error.strerror or error}") from None
        notes = set_aside()
    except BaseException:
        for file in staged.values():
            with contextlib.suppress(OSError):
                file.unlink()
        raise
    for name, file in staged.items():
        file.replace(folder / name)
    return notes


def write_status(
    folder: Path,
    world: World,
    status: str,
    step: int | None,
    reason: str = "",
    spent: Mapping[str, float] | None = None,
) -> str:
    """Write "running", "complete", "preempted" or "failed" to run.json, on rank 0. Step None keeps the recorded one.

    Args:
        spent: of the run's clock; None keeps what is recorded.

    Returns:
        the status of the run, which is an earlier one if this attempt was refused.
    """
    if world.rank == 0:
        with contextlib.suppress(OSError):  # without its content, "carried_out" would be lost
            before = read(folder, strict=True) | (of_run(spent) if spent else {})
            return _end(folder, before, status, step, reason)
    return status


def stand_in(folder: Path, step: int, reason: str) -> None:
    """Write "failed" for rank 0, which may be gone, unless it has written how it ended."""
    before = read(folder)
    if before.get("status") == "running" or "starting" in before:
        _end(folder, before, "failed", step, reason)


def _end(folder: Path, before: dict[str, Any], status: str, step: int | None, reason: str) -> str:
    """Write and return a status. A failure before the attempt has changed the run is "refused": it is as it was."""
    starting = before.pop("starting", None)
    if status == "failed" and "refused" in before and not starting:
        return str(before.get("status", status))  # another rank has written it
    if status == "failed" and starting and before.get("status") != "starting":
        _write(folder, before | {"refused": {"message": reason, "time": round(time.time(), 3)} | _attempt()})
        return str(before.get("status", status))
    before.pop("refused", None)
    _write(folder, before | _now(status, before.get("step", 0) if step is None else step, reason))
    return status


def _now(status: str, step: int, reason: str) -> dict[str, Any]:
    return {"status": status, "step": step, "reason": reason, "time": round(time.time(), 3)} | _attempt()


def _attempt() -> dict[str, Any]:
    return {"pid": os.getpid(), "attempt": attempt_id()}


def read(folder: Path, strict: bool = False) -> dict[str, Any]:
    """The content of run.json; empty if it is missing or damaged. An I/O error is raised only if `strict`."""
    try:
        content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    except OSError:
        if strict:
            raise
        return {}


def _encoded(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _write(folder: Path, content: dict[str, Any]) -> None:
    staged = folder / ".run.json"
    with contextlib.suppress(OSError):  # a full disk does not stop training
        staged.write_bytes(_encoded(content))
        staged.replace(folder / "run.json")


def facts(layout: Layout, world: World, machines: list[str], argv: Sequence[str]) -> dict[str, Any]:
    """How the run was started: command, code, versions, machines, mesh."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.processor()
    return {
        "argv": list(argv),
        "git": git_state(Path(__file__).parents[2]),
        "versions": {"torchtitan_lite": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": f"{world.device.type} {device}".strip(),
        "machines": machines,
        "world_size": world.world_size,
        "mesh": {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard},
        "started": round(time.time(), 3),
    }


def git_state(folder: Path) -> dict[str, Any]:
    """The commit, and whether tracked files differ; empty if the code is not a git repository."""
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
