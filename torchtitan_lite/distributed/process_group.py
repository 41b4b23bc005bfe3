"""The process group and the mesh: which device, how many ranks, who speaks, and how to leave without a crash."""

import contextlib
import ctypes
import os
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # exported, but not by name
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from torchtitan_lite.config.derive import Layout, usable_cores
from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.errors import ConfigError, shortened
from torchtitan_lite.terminal import flush, print_error

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device
    threads: int  # CPU threads of this rank
    local_world_size: int = 1  # ranks of this machine
    untimed: dist.ProcessGroup | None = None  # for loads, see `patient_group`; None: the default group


def env_int(name: str, default: int) -> int:
    """What torchrun says of this process; the default under plain python.

    Raises:
        ConfigError: the environment holds something else than a number.
    """
    text = os.environ.get(name, str(default))
    least = 1 if name.endswith("WORLD_SIZE") else 0
    if not text.isdecimal() or len(text) > 10 or not least <= int(text) < 2**31:
        raise ConfigError(
            f"{name}={shortened(repr(text))} in the environment should be a number of {least} or more, as "
            f"torchrun sets it; unset {name} for a world of one"
        )
    return int(text)


def local_rank() -> int:
    """The rank among those of this machine; 0 if the environment makes no sense (which is said elsewhere)."""
    try:
        return env_int("LOCAL_RANK", 0)
    except ConfigError:
        return 0


@contextlib.contextmanager
def process_group(run: RunConfig) -> Iterator[World]:
    """A process group over all ranks that torchrun started, or a world of one under plain python.

    Collectives of CPU tensors go through gloo, those of CUDA tensors through NCCL.
    """
    device = choose_device(run.device, env_int("LOCAL_RANK", 0))
    # torchrun sets one thread for each rank and plain python takes all cores. The sums of a matrix product depend on
    # how many threads share it, so the number is fixed here, and recorded: it is part of what a bitwise resume needs.
    threads = run.threads or max(usable_cores() // env_int("LOCAL_WORLD_SIZE", 1), 1)
    torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=run.timeout_minutes)
    if "RANK" in os.environ:
        die_with_launcher()
        try:
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        except ValueError as error:  # a variable that torchrun would set is missing, or is no number
            raise ConfigError(f"RANK is set, but not as torchrun does: {str(error).splitlines()[0]}") from None
        except dist.DistNetworkError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise ConfigError(
                f"the ranks can't meet at {where}: {str(error).splitlines()[0]}\n  If the port is in use, choose "
                "another MASTER_PORT; torchrun --standalone takes a free one"
            ) from None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _store_of_this_attempt(store, rank, world_size, timeout)
    else:
        store, rank, world_size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]  # exported, but not by name
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    local_world_size = env_int("LOCAL_WORLD_SIZE", 1)
    yield World(dist.get_rank(), dist.get_world_size(), device, threads, local_world_size, untimed_group())


def _store_of_this_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """A store of the same ranks under a prefix that no earlier attempt has used.

    torchrun keeps its store across restarts, with the keys of the ranks that died. TORCHELASTIC_RESTART_COUNT does not
    tell attempts apart: each machine counts its own failures. So rank 0 chooses the prefix and offers it to whoever
    registered last as rank r, until it is acknowledged: a dead rank never does.

    Raises:
        DistStoreError: a rank did not register within the timeout.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank != 0:
        me = uuid.uuid4().hex
        store.set(f"attempt/rank {rank}", me)
        prefix = store.get(f"attempt/prefix for {me}").decode()
        store.set(f"attempt/{prefix} has {me}", "")
        return PrefixStore(prefix, store)
    prefix = uuid.uuid4().hex
    for other in range(1, world_size):
        while True:
            registered = store.get(f"attempt/rank {other}").decode()
            store.set(f"attempt/prefix for {registered}", prefix)
            try:
                store.wait([f"attempt/{prefix} has {registered}"], timedelta(seconds=1))
                break
            except dist.DistStoreError:  # of an earlier attempt, or slow
                if time.monotonic() > deadline:
                    raise dist.DistStoreError(f"rank {other} did not arrive within {timeout}") from None
    return PrefixStore(prefix, store)


_PATIENT = "patient"


def untimed_group() -> dist.ProcessGroup:
    """A gloo group of all ranks whose collectives wait for as long as it takes: for saves and loads, which take as long
    as there are bytes. It is watchdog.py that ends the run if none move any more."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(days=30), group_desc=_PATIENT)
    return group


def limit_group_timeouts(timeout_minutes: float) -> None:
    """Give every group but the patient ones this timeout. Those of a mesh are made with torch's own, 30 minutes."""
    c10d = dist.distributed_c10d
    for group in list(c10d._world.pg_map):
        if group.group_desc != _PATIENT:
            c10d._set_pg_timeout(timedelta(minutes=timeout_minutes), group)


def die_with_launcher() -> None:
    """Have the kernel end this process when its launcher is killed: it would write into the run's folder for ever.

    Call it as early as possible. The kernel only signals a death that follows prctl, so the parent is read before and
    compared after. Its number alone says nothing: in a container torchrun may itself be process 1. A launcher that
    died before the first look is not noticed here; its store went with it, so this process finds no other ranks and
    ends in `rendezvous`, before it writes to the run.
    """
    if "RANK" not in os.environ:
        return
    pr_set_pdeathsig = 1  # prctl.h
    launcher = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGKILL)


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of this rank; a GPU is made the current one."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def keep_freed_memory() -> None:
    """Have glibc keep large freed blocks, instead of giving them back to the kernel and zeroing new pages each step.

    Measured: about 10 % more tokens per second on a small model (BENCHMARKS.md). Does nothing without glibc.
    """
    m_trim_threshold, m_top_pad, m_mmap_threshold = -1, -2, -3  # malloc.h
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_threshold, 1 << 30)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 64 << 20)


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The mesh that `fully_shard` takes: axis dp_shard, or dp_replicate x dp_shard (HSDP)."""
    if layout.dp_replicate == 1:
        return init_device_mesh(device.type, (layout.dp_shard,), mesh_dim_names=("dp_shard",))
    shape = (layout.dp_replicate, layout.dp_shard)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place; every rank gets the same bits."""
    dist.all_reduce(values)
    return values


def from_rank0(value: T | None, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's Python value, on every rank. The others' argument is not looked at."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]  # type: ignore[return-value]  # rank 0 never passes None


def print_once(message: str, local_rank: int) -> None:
    """Print an error that most likely all ranks have, on the first rank of each machine.

    torchrun ends all ranks as soon as one has failed, so the others must not leave before the first has spoken: they
    wait to be ended. One that is still there after 10 s has an error of its own, and says so.
    """
    if local_rank != 0:
        time.sleep(10)
        message = f"[local rank {local_rank}] {message}"
    print_error(message)


def exit_process(exit_code: int = 0) -> NoReturn:
    """End this process, for good.

    gloo's threads may abort an interpreter that is being torn down ("terminate called without an active exception"),
    which turns a finished run into a failed one. So: wait for each other, destroy the group, flush, skip the tear-down.
    """
    if exit_code == 0 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    flush()
    os._exit(exit_code)
