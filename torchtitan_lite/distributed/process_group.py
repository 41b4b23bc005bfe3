"""The process group and the mesh: devices, ranks, timeouts, and a clean exit."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # mypy: not an explicit re-export
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_lite.config.schema import FsdpConfig, RunConfig
from torchtitan_lite.distributed.lost import explaining_lost_ranks
from torchtitan_lite.environment import (
    allow_open_files,
    cpu_threads,
    die_with_launcher,
    env_int,
    keep_freed_memory,
)
from torchtitan_lite.terminal import flush


@dataclass(frozen=True)
class Process:
    """Rank, world size and device of this process."""

    rank: int
    world_size: int
    device: torch.device
    threads: int  # CPU threads of this rank
    local_world_size: int = 1  # ranks on this machine
    untimed: dist.ProcessGroup | None = None  # for saves and loads, see `untimed_group`; None: the default group
    store: Store | None = None  # of the process group; None: there is none


@contextlib.contextmanager
def process_group(run: RunConfig) -> Iterator[Process]:
    """Open a process group over all of torchrun's ranks, or a world of one under plain python.

    Collectives of CPU tensors use gloo, those of CUDA tensors NCCL. Without an exception, the ranks wait for each other
    at the end: torchrun kills the others as soon as one exits with a nonzero code.
    """
    device = choose_device(run.device, env_int("LOCAL_RANK", 0))
    threads, _ = cpu_threads(run.threads)
    torch.set_num_threads(threads)
    if device.type == "cpu":
        keep_freed_memory()
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":  # torch has no setting per device
        torch.set_float32_matmul_precision("high" if run.tf32 else "highest")
    die_with_launcher()
    allow_open_files()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    minutes = run.start_minutes(env_int("WORLD_SIZE", 1))
    with explaining_lost_ranks():
        if "RANK" in os.environ:
            from torchtitan_lite.distributed.rendezvous import join_store

            store, rank, world_size = join_store(minutes)
        else:
            store, rank, world_size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]  # mypy: not an explicit re-export
        # gloo connects only the ranks that communicate; in smaller worlds all, so an unreachable one is an error now
        if world_size > 64:
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=minutes)
        )
        set_group_timeouts(run.timeout_minutes)
        yield Process(rank, world_size, device, threads, env_int("LOCAL_WORLD_SIZE", 1), untimed_group(), store)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


_UNTIMED, NO_LIMIT_MINUTES = "untimed", 30 * 24 * 60.0


def untimed_group() -> dist.ProcessGroup:
    """Make a gloo group of all ranks without a timeout, for saves and loads. The watchdog ends hanging ones."""
    timeout = timedelta(minutes=NO_LIMIT_MINUTES)
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout, group_desc=_UNTIMED)
    return group


def set_group_timeouts(timeout_minutes: float = NO_LIMIT_MINUTES) -> None:
    """Set the timeout of every group but the untimed one. A mesh's groups start with torch's 30 minutes.

    With a Watchdog there is no limit: NCCL would abort the process, and gloo raise, while another rank compiles.
    """
    for group in list(dist.distributed_c10d._world.pg_map):  # torch has no public list of groups
        if group.group_desc != _UNTIMED:
            group.set_timeout(timedelta(minutes=timeout_minutes))


def choose_device(name: str, local_rank: int) -> torch.device:
    """Return this rank's device for run.device ("auto", "cpu" or "cuda"). A GPU becomes the current device.

    Some launchers show each process only its own GPU, whatever its LOCAL_RANK.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", 0 if torch.cuda.device_count() == 1 else local_rank)
    torch.cuda.set_device(device)
    return device


def build_mesh(config: FsdpConfig, device: torch.device) -> DeviceMesh:
    """Build the mesh for `fully_shard`: axis dp_shard, or dp_replicate x dp_shard (HSDP)."""
    replicate, shard = config.mesh_shape(dist.get_world_size())
    axes = {"dp_replicate": replicate, "dp_shard": shard} if replicate > 1 else {"dp_shard": shard}
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum a tensor over all ranks, or those of a group, if there are some, in place. Every rank gets the same bits."""
    if dist.is_initialized():
        dist.all_reduce(values, group=group)
    return values


def exit_process(exit_code: int = 0) -> NoReturn:
    """Flush, and exit without Python's tear-down.

    gloo's threads may abort an interpreter that is shutting down, which turns a finished run into a failed one.
    """
    flush()
    os._exit(exit_code)
