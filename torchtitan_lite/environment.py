"""This process: torchrun's environment, cores and threads, and dying with the launcher. Does not need torch."""

import contextlib
import ctypes
import gc
import itertools
import math
import os
import re
import resource
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.terminal import counted, prepare_streams


def env_int(name: str, default: int) -> int:
    """Return an integer that torchrun sets in the environment; the default under plain python."""
    return int(os.environ.get(name, default))


# if there are several processes, a launcher sets a different value
_ALONE = {
    **{"RANK": "", "WORLD_SIZE": "1"},
    **{"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"},  # srun, Open MPI, MPICH
    "PET_NNODES": "1",  # machines of Kubeflow's TrainJob
}


def world_size(argv: Sequence[str], n_gpus: int) -> int:
    """Return the number of ranks, as torchrun sets it; 1 under plain python.

    Raises:
        ConfigError: this is one process of several, without all of torchrun's variables. Each would train alone, or on
            the same one of `n_gpus`. Not raised if `argv` only asks about the config.
    """
    given = {name: os.environ[name] for name, alone in _ALONE.items() if os.environ.get(name, alone) != alone}
    needed = {
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        *(["LOCAL_RANK"] if n_gpus > 1 and "WORLD_SIZE" in given else []),
    }
    missing = needed - os.environ.keys() if given else ()
    if missing and not {"-h", "--help", "--help-all", "--print-config", "--check-config"} & {*argv}:
        raise ConfigError(
            f"the environment has {', '.join(map('='.join, given.items()))}, as if this were one of several processes, "
            f"but no {', '.join(sorted(missing))}. Start the processes with torchrun, which sets them all "
            f"(docs/cluster.md); to train in this process alone, unset {' '.join(given)}"
        )
    return env_int("WORLD_SIZE", 1)


def local_rank() -> int:
    """Return this rank's number on its machine."""
    return env_int("LOCAL_RANK", 0)


def cpu_threads(configured: int) -> tuple[int, str]:
    """Return this rank's number of CPU threads, and where it comes from. `configured` is run.threads.

    The number changes the order of a matmul's sums, so a run records it for a bitwise resume. torchrun sets
    OMP_NUM_THREADS=1 on its own, so the variable is used only without a launcher.
    """
    if configured:
        return configured, "run.threads"
    variable = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list has a number for each nested level
    if "LOCAL_WORLD_SIZE" not in os.environ and variable.isdecimal() and 0 < int(variable) <= 4096:
        return int(variable), "OMP_NUM_THREADS"
    cores, ranks = usable_cores(), env_int("LOCAL_WORLD_SIZE", 1)
    return max(cores // ranks, 1), f"{counted(cores, 'core')} / {counted(ranks, 'rank')}"


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, by its affinity and its control groups (version 2).

    Each group limits the groups inside it. A container may see its own group at the path "/", or at the host's path.
    """
    limits = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]  # no Linux
    mount = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):  # not Linux
        found = re.search("^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE)
        group = mount / (found[1] if found else "")
        for folder in [mount, *(p for p in (group, *group.parents) if mount in p.parents)]:
            with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ("max")
                quota, period = (folder / "cpu.max").read_text().split()
                limits.append(math.ceil(int(quota) / int(period)))
    return min(limits)


def prepare_process() -> None:
    """End this process with its launcher, make output streams safe, and let CUDA's memory segments grow."""
    if not any(name.endswith("ALLOC_CONF") for name in os.environ):  # torch reads it when CUDA is first used
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    die_with_launcher()
    prepare_streams()


def die_with_launcher() -> None:
    """Make the kernel kill this process when torchrun is killed. Call it as early as possible.

    Otherwise an orphaned rank would write to the run folder forever. The kernel only signals deaths after prctl, so
    this compares the parent before and after. (Parent process 1 proves nothing: in a container that may be torchrun.)
    If the launcher died earlier, its store died too, and the rendezvous fails.
    """
    if "RANK" not in os.environ:
        return
    launcher = os.getppid()
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGKILL)


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks. By default it returns them to the kernel, which zeroes new pages each step.

    Gives about 10 % more tokens per second on a small model (docs/lab).
    """
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3  # malloc.h
    with contextlib.suppress(AttributeError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_threshold, 1 << 30)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 64 << 20)


def allow_open_files() -> None:
    """Raise the soft limit of open files: each gloo group may connect to every rank.

    The new limit is the hard one, but at most a million, because some programs close every number up to the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**20 if hard == resource.RLIM_INFINITY else min(hard, 2**20)
    if resource.RLIM_INFINITY != soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # forbidden, e.g. in a sandbox: this is only a precaution
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def python_command() -> str:
    """Return the interpreter's command, which works here without activating a virtual environment."""
    here = os.path.relpath(sys.executable)
    return sys.executable if here.startswith("..") else here


def this_command(**given: str) -> str:
    """Return this process's command with changed options; see `command_with`."""
    n = env_int("WORLD_SIZE", 1)
    return command_with(sys.argv, given, n, n // env_int("LOCAL_WORLD_SIZE", n))


def command_with(argv: Sequence[str], given: Mapping[str, str], n: int, n_machines: int) -> str:
    """Return a command of train.py with changed options, and without a mode like `--check-config`.

    It begins with $TORCHTITAN_LITE_LAUNCHER, in which NODES is the number of machines (scripts/slurm.sbatch). Without
    it, several machines have a launcher that is not known.

    Args:
        argv: of the command to change.
        given: values by option, with "__" for a dot; an empty one leaves the option out.
        n: number of ranks.
    """
    options = {f"--{name.replace('__', '.')}": value for name, value in given.items()}
    left_out = {"--print-config", "--check-config", "--inspect", "--dry-run", "--replay", "--retry", *options}
    kept = [
        word
        for before, word in itertools.pairwise(argv)
        if word.split("=")[0] not in left_out and (before not in left_out or word.startswith("--"))
    ]
    here = python_command()
    torchrun = f"{shlex.quote(os.path.join(os.path.dirname(here), 'torchrun'))} --nproc-per-node {n}"
    launcher = "..." if n_machines > 1 else torchrun if n > 1 else shlex.quote(here)
    command = os.environ.get("TORCHTITAN_LITE_LAUNCHER", f"{launcher} train.py").replace("NODES", str(n_machines))
    return f"{command} {shlex.join([*kept, *(f'{option}={value}' for option, value in options.items() if value)])}"


def disable_automatic_gc() -> None:
    """Disable automatic garbage collection; `train` collects at the same steps on all ranks.

    Automatic collections happen at different steps on each rank, and all ranks wait for each of them. Existing objects
    (mostly torch's modules) are frozen, so a collection takes milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
