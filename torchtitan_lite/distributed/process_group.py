"""The process group and the mesh: devices, ranks, timeouts, and a clean exit."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_lite.config.derive import Layout, quota_of_cores, usable_cores
from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.distributed import process
from torchtitan_lite.distributed.rendezvous import find_ranks
from torchtitan_lite.errors import ConfigError, shortened
from torchtitan_lite.terminal import counted, flush, print_error

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    world_size: int
    device: torch.device
    threads: int  # CPU threads of this rank
    local_world_size: int = 1  # ranks on this machine
    untimed: dist.ProcessGroup | None = None  # for loads, see `untimed_group`; None: the default group


def env_int(name: str, default: int) -> int:
    """An integer that torchrun sets in the environment; the default under plain python.

    Raises:
        ConfigError: the value is not a number in range.
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
    """This rank's number on its machine; 0 if the environment is invalid, which `process_group` reports."""
    try:
        return env_int("LOCAL_RANK", 0)
    except ConfigError:
        return 0


@contextlib.contextmanager
def process_group(run: RunConfig) -> Iterator[World]:
    """A process group over all ranks that torchrun started, or a world of one under plain python.

    Collectives of CPU tensors use gloo, those of CUDA tensors NCCL.
    """
    device = choose_device(run.device, env_int("LOCAL_RANK", 0))
    threads, _ = cpu_threads(run)
    torch.set_num_threads(threads)
    if device.type == "cpu":
        process.keep_freed_memory()
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    process.die_with_launcher()
    timeout = timedelta(minutes=run.timeout_minutes)
    if "RANK" in os.environ:
        store, rank, world_size = find_ranks(timeout)
    else:
        store, rank, world_size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]  # exported, but not by name
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    yield World(rank, world_size, device, threads, env_int("LOCAL_WORLD_SIZE", 1), untimed_group())


def cpu_threads(run: RunConfig) -> tuple[int, str]:
    """The number of CPU threads of this rank, and where it comes from.

    It changes how a matrix product is summed, so it is fixed and recorded for a bitwise resume. torchrun sets
    OMP_NUM_THREADS=1 by itself, so the variable is used only without a launcher.
    """
    if run.threads:
        return run.threads, "run.threads"
    variable = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list has a number for each nested level
    if "LOCAL_WORLD_SIZE" not in os.environ and variable.isdecimal() and 0 < int(variable) <= 4096:
        return int(variable), "OMP_NUM_THREADS"
    cores, ranks = usable_cores(), env_int("LOCAL_WORLD_SIZE", 1)
    quota = quota_of_cores()
    limit = f"quota of {quota:g} cores" if 0 < quota <= cores else counted(cores, "core")
    return max(cores // ranks, 1), f"{limit} / {counted(ranks, 'rank')}"


_UNTIMED = "untimed"


def untimed_group() -> dist.ProcessGroup:
    """A gloo group of all ranks without a timeout, for saves and loads. The watchdog ends those that hang."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(days=30), group_desc=_UNTIMED)
    return group


def limit_group_timeouts(timeout_minutes: float) -> None:
    """Give every group but the untimed ones this timeout. The groups of a mesh start with torch's 30 minutes."""
    c10d = dist.distributed_c10d
    for group in list(c10d._world.pg_map):  # private, as is the setter: torch has no public list of groups
        if group.group_desc != _UNTIMED:
            c10d._set_pg_timeout(timedelta(minutes=timeout_minutes), group)


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank: of run.device, "auto", "cpu" or "cuda". A GPU becomes the current one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The mesh for `fully_shard`: axis dp_shard, or dp_replicate x dp_shard (HSDP)."""
    if layout.dp_replicate == 1:
        return init_device_mesh(device.type, (layout.dp_shard,), mesh_dim_names=("dp_shard",))
    shape = (layout.dp_replicate, layout.dp_shard)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place. Every rank gets the same bits."""
    dist.all_reduce(values)
    return values


def from_rank0(value: T | None, group: dist.ProcessGroup | None = None) -> T:
    """The Python value of the group's first rank, on every rank. The other ranks' argument is ignored."""
    is_source, source = dist.get_rank(group) == 0, dist.get_global_rank(group, 0) if group else 0
    mine = _to_bytes(value) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([len(mine)], device="cpu")
    dist.broadcast(size, source, group)
    data = mine if is_source else torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.broadcast(data, source, group)
    return _from_bytes(data)


def from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The Python value of each rank of the group, on every rank."""
    mine = _to_bytes(value)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(mine)], device="cpu"), group)
    longest = max(int(size) for size in sizes)
    data = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in sizes]
    dist.all_gather(data, torch.cat([mine, mine.new_zeros(longest - len(mine))]), group)
    return [_from_bytes(each[: int(size)]) for each, size in zip(data, sizes, strict=True)]


# torch's own collectives of objects unpickle what arrives, which can run code; JSON can't. All of its objects are tags,
# {"tuple": [...]}, so that each value keeps its type.
_TAGGED: dict[str, Any] = {"tuple": tuple, "dict": dict, "path": Path}


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(_tagged(value)).encode()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    def untagged(content: dict[str, Any]) -> Any:
        ((tag, value),) = content.items()
        return _TAGGED[tag](value)

    return json.loads(data.numpy().tobytes(), object_hook=untagged)


def _tagged(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"dict": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_tagged(item) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Path):
        return {"path": str(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{type(value).__name__} can't be sent between ranks")


def print_once(message: str, local_rank: int) -> None:
    """Print an error that most likely all ranks have, on the first rank of each machine.

    torchrun kills all ranks as soon as one exits, so the others wait for the first to print. One that is still alive
    after 10 s has an error of its own, and prints it.
    """
    if local_rank != 0:
        time.sleep(10)
        message = f"[local rank {local_rank}] {message}"
    print_error(message)


def exit_process(exit_code: int = 0) -> NoReturn:
    """Synchronise, destroy the group, flush, and exit without Python's tear-down.

    gloo's threads may abort an interpreter that is shutting down, which turns a finished run into a failed one.
    """
    if exit_code == 0 and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    flush()
    os._exit(exit_code)
