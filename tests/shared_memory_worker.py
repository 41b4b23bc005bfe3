"""Collectives through shared memory against gloo's, on each rank: `[PIECE [BROKEN_RANK]]`."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.distributed.process_group import World, process_group
from torchtitan_lite.distributed.shared_memory import AllGather, ReduceScatter, SharedMemory, apply_shared_memory

# the names in torch 2.13, and before
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def compare(world: World, piece: int) -> None:
    """Sizes below, at and above a piece, in turn, so that both halves are written over and over."""
    group: Any = dist.group.WORLD
    shared = SharedMemory(group, slot=piece)
    gather, reduce = AllGather(shared), ReduceScatter(shared)
    for n in (1, 5, piece // 4 - 1, piece // 4, piece // 4 + 1, 3 * piece + 7):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            values = torch.randn(world.world_size * n, generator=torch.Generator().manual_seed(n + world.rank))
            whole = (values * 100).to(dtype)
            found, expected = whole.new_zeros(whole.shape), whole.new_zeros(whole.shape)
            gather(found, whole[:n].clone(), group)
            all_gather(expected, whole[:n].clone(), group=group)
            assert found.equal(expected), f"all-gather of {n} {dtype}"
            inside = found.new_zeros(found.shape)
            mine = inside[world.rank * n : (world.rank + 1) * n]  # as FSDP calls it
            mine.copy_(whole[:n])
            gather(inside, mine, group)
            assert inside.equal(expected), f"all-gather of {n} {dtype} in place"
            if dtype == torch.uint8:
                continue
            for op, scale in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world.world_size)):
                total, one = whole.new_zeros(n), whole.new_zeros(n)
                reduce(total, whole.clone(), group, op)
                reduce_scatter(one, whole.clone(), op=dist.ReduceOp.SUM, group=group)
                one /= scale
                if world.world_size == 2:
                    assert total.equal(one), f"reduce-scatter of {n} {dtype}"
                else:  # gloo adds in another order
                    torch.testing.assert_close(total, one, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2.0)


def used(world: World) -> None:
    """FSDP's collectives go through it, and nothing else of FSDP's does."""
    model = sharded(world)
    apply_shared_memory(model, init_device_mesh("cpu", (world.world_size,)))

    def sent(*_: Any, **__: Any) -> None:
        raise AssertionError("through gloo")

    names = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
    honest = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    for name in honest:
        setattr(dist, name, sent)
    model.unshard(async_op=True)
    model(torch.full((2, 8), world.rank + 1.0)).sum().backward()
    for name, function in honest.items():
        setattr(dist, name, function)
    grad: Any = model.weight.grad
    mean = 2 * sum(range(1, world.world_size + 1)) / world.world_size
    assert grad.full_tensor().equal(torch.full((8, 8), mean)), grad


def sharded(world: World) -> Any:
    model = nn.Linear(8, 8, bias=False)
    return fully_shard(model, mesh=init_device_mesh("cpu", (world.world_size,)))


def without(world: World, broken: int) -> None:
    """A rank that can't map memory: all go on by gloo, and rank 0 says so."""
    if world.rank == broken:

        def fails(*_: Any) -> int:
            raise OSError("not today")

        os.memfd_create, os.open = fails, fails  # type: ignore[assignment]
    model = sharded(world)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        apply_shared_memory(model, init_device_mesh("cpu", (world.world_size,)))
    assert [("not today" in str(w.message)) for w in said] == [True] * (world.rank == 0)
    model(torch.ones(2, 8)).sum().backward()
    assert model.weight.grad is not None


def main(argv: Sequence[str]) -> int:
    with process_group(RunConfig(device="cpu", threads=1)) as world:
        if len(argv) > 1:
            without(world, int(argv[1]))
        else:
            compare(world, int(argv[0]))
            used(world)
    return 0
