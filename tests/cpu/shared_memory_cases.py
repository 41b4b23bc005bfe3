"""What test_shared_memory.py runs on each rank: collectives against gloo's and against sums in rank order."""

import contextlib
import os
import signal
import socket
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from torchtitan_lite import cpu
from torchtitan_lite.cpu.shared_memory import AllGather, ReduceScatter, SharedMemory, all_reduce
from torchtitan_lite.distributed.lost import means_lost_rank
from torchtitan_lite.distributed.process_group import Process, set_group_timeouts

# the names in torch 2.13, and before
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def values_of(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    """What this rank contributes; every rank can compute it for the others."""
    return (torch.randn(n, generator=torch.Generator().manual_seed(n + rank)) * 100).to(dtype)


def sum_in_order(ranks: int, n: int, dtype: torch.dtype) -> Tensor:
    total = values_of(0, n, dtype)
    for rank in range(1, ranks):
        total += values_of(rank, n, dtype)
    return total


def require_as_gloo(found: Tensor, gloo: Tensor, ranks: int, what: str) -> None:
    if ranks == 2:
        assert found.equal(gloo), what
    else:  # gloo adds in another order
        torch.testing.assert_close(found, gloo, rtol=2e-2 if found.dtype == torch.bfloat16 else 1e-5, atol=2.0)


def compare_one(gather: AllGather, reduce: ReduceScatter, n: int, dtype: torch.dtype) -> None:
    """Each collective with n elements per rank."""
    group: Any = dist.group.WORLD
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = values_of(rank, ranks * n, dtype)
    found, expected = whole.new_zeros(whole.shape), whole.new_zeros(whole.shape)
    gather(found, whole[:n].clone(), group)
    all_gather(expected, whole[:n].clone(), group=group)
    assert found.equal(expected), f"all-gather of {n} {dtype}"
    inside = found.new_zeros(found.shape)
    mine = inside[rank * n : (rank + 1) * n]  # as FSDP calls it
    mine.copy_(whole[:n])
    gather(inside, mine, group)
    assert inside.equal(expected), f"all-gather of {n} {dtype} in place"
    if dtype == torch.uint8:
        return
    in_order = sum_in_order(ranks, ranks * n, dtype)
    total, one = whole.new_zeros(n), whole.new_zeros(n)
    reduce(total, whole.clone(), group, dist.ReduceOp.SUM)
    assert total.equal(in_order[rank * n : (rank + 1) * n]), f"reduce-scatter of {n} {dtype}"
    reduce_scatter(one, whole.clone(), group=group)
    require_as_gloo(total, one, ranks, f"reduce-scatter of {n} {dtype}")
    both = whole.clone(), whole.clone()
    all_reduce(reduce._shared, both[0])
    assert both[0].equal(in_order), f"all-reduce of {n} {dtype}"
    dist.all_reduce(both[1])
    require_as_gloo(*both, ranks, f"all-reduce of {n} {dtype}")


def compare(_world: Process, piece: int) -> None:
    """Sizes below, at and above a piece, in turn, so that both halves are written over and over."""
    group: Any = dist.group.WORLD
    shared = SharedMemory(group, slot=piece)
    gather, reduce = AllGather(shared), ReduceScatter(shared)
    for n in (1, 5, piece // 4 - 1, piece // 4, piece // 4 + 1, 3 * piece + 7):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8):
            compare_one(gather, reduce, n, dtype)


def in_turns(_world: Process, times: int) -> None:
    """No rank leaves a barrier before all have entered it. What is mapped is closed."""
    group: Any = dist.group.WORLD
    with patch.object(os, "close", wraps=os.close) as closed:
        shared = SharedMemory(group, slot=64)
    assert closed.call_count == 1 + (shared.rank == 0)
    ((_, slots),) = shared.pieces(1, torch.int64)
    seen = slots[:, 0]
    for number in range(1, times):
        seen[shared.rank] = number
        shared.barrier()
        assert seen.tolist() == [number] * shared.size
        shared.barrier()


# --- in FSDP ----------------------------------------------------------------------------------------------------


def sharded(mesh: DeviceMesh, *, neighbours: int | bool = True) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 8, bias=False), nn.Linear(8, 5, bias=False))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=neighbours).set_force_sum_reduction_for_comms(True)
    return fully_shard(model, mesh=mesh)


def gradients(model: Any) -> list[Tensor]:
    model(torch.full((2, 9), dist.get_rank() + 1.0)).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def used(_world: Process, shape: str) -> None:
    """All of FSDP's collectives in a mesh, "2x2" or "4", go through it; with "/2", also those of N neighbours."""
    ranks = [int(n) for n in shape.split("/")[0].split("x")]
    names = ("dp_replicate", "dp_shard")[-len(ranks) :]
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(*ranks), mesh_dim_names=names)
    neighbours = int(shape.split("/")[1]) if "/" in shape else True
    expected = gradients(sharded(mesh, neighbours=neighbours))
    model = sharded(mesh, neighbours=neighbours)
    cpu.apply_shared_memory(model, mesh)

    def loss() -> Tensor:
        return model(torch.full((2, 9), dist.get_rank() + 1.0)).square().sum()

    if "/" in shape:  # the neighbours find each other's memory with gloo once
        loss().backward()
        model.zero_grad()
    of_gloo: list[tuple[Any, str]] = [
        (dist, f"{name}_{way}") for name in ("all_gather", "reduce_scatter") for way in ("single", "tensor")
    ]
    of_gloo += [(dist, "all_gather_into_tensor"), (dist.ProcessGroup, "allreduce")]
    total = loss()
    with contextlib.ExitStack() as stack:
        for owner, name in of_gloo:
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, side_effect=AssertionError("through gloo")))
        total.backward()
    for parameter, whole in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), whole)


def without(process: Process, broken: int) -> None:
    """A rank that can't map memory: all use gloo, and rank 0 warns."""
    mesh = DeviceMesh("cpu", torch.arange(process.world_size), mesh_dim_names=("dp_shard",))
    model = sharded(mesh)
    with warnings.catch_warnings(record=True) as said, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        if process.rank == broken:
            for owner, name in ((os, "memfd_create"), (socket, "recv_fds")):
                stack.enter_context(patch.object(owner, name, side_effect=OSError("not today")))
        cpu.apply_shared_memory(model, mesh)
    told = [w for w in said if w.category is UserWarning]  # not of files that the garbage collector closes
    assert [("not today" in str(w.message)) for w in told] == [True] * (process.rank == 0)
    assert all(gradient.any() for gradient in gradients(model))


# --- ranks that do not come -------------------------------------------------------------------------------------


def lost(process: Process) -> None:
    """The last rank ends. The others wait in each of the collectives, FSDP's all-reduce too."""
    mesh = DeviceMesh("cpu", torch.arange(process.world_size).view(-1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = sharded(mesh)
    cpu.apply_shared_memory(model, mesh)
    shared = SharedMemory(mesh.get_group("dp_replicate"))
    shared.barrier()
    last = process.world_size - 1
    if process.rank == last:
        os._exit(0)
    for action in (shared.barrier, lambda: gradients(model)):
        # another may have noticed, and ended
        with pytest.raises(RuntimeError, match=rf"exited: rank (\d, )*{last}$") as caught:
            action()
        assert means_lost_rank(caught.value)
    dist.destroy_process_group()  # it is broken


def late(process: Process) -> None:
    """The last rank comes after the timeout."""
    group: Any = dist.group.WORLD
    shared = SharedMemory(group)
    set_group_timeouts(2 / 60)
    store = dist.distributed_c10d._get_default_store()
    if process.rank == process.world_size - 1:
        store.wait([str(rank) for rank in range(process.rank)], timedelta(minutes=5))
        store.set("all", "noticed")
        dist.destroy_process_group()
        return
    store.set(f"{process.rank} is here", "")  # or a busy machine makes more than one rank late
    store.wait([f"{rank} is here" for rank in range(process.world_size - 1)], timedelta(minutes=5))
    began = time.monotonic()
    # only the rank that has not arrived
    with pytest.raises(RuntimeError, match=f" 2000ms .*: rank {process.world_size - 1}$") as caught:
        shared.barrier()
    assert time.monotonic() - began >= 1.8
    assert means_lost_rank(caught.value)
    store.set(str(process.rank), "noticed")
    store.wait(["all"], timedelta(minutes=5))  # an earlier exit would be the other's error
    store.set(f"{process.rank} leaves", "")
    if process.rank == 0:  # which has the store
        store.wait([f"{rank} leaves" for rank in range(process.world_size - 1)], timedelta(minutes=5))
    dist.destroy_process_group()


def interrupted(process: Process) -> None:
    """A signal while a rank waits: its handler runs, which under gloo it would not before the end of the collective."""
    group: Any = dist.group.WORLD
    shared = SharedMemory(group)
    store = dist.distributed_c10d._get_default_store()
    if process.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: store.set("handled", "yes"))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    else:
        store.wait(["handled"], timedelta(minutes=5))
    shared.barrier()


# by the number of ranks; the last of 3 leaves no group behind
CASES: dict[int, list[tuple[Callable[..., None], *tuple[Any, ...]]]] = {
    2: [
        *((compare, 1 << 12), (compare, 64), (in_turns, 500), (interrupted,)),
        *((used, "2"), (used, "2x1"), (without, 0), (without, 1)),
    ],
    3: [(compare, 64), (compare, 1 << 12), (in_turns, 500), (used, "3x1"), (late,)],
    4: [(compare, 1 << 16), (used, "2x2"), (used, "4/2")],
}


def all_cases(process: Process) -> None:
    """The traceback of the first that fails names it."""
    for case, *arguments in CASES[process.world_size]:
        case(process, *arguments)
