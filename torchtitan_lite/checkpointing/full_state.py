"""Full state dicts: rank 0 gathers whole tensors and sends each rank its rows; or each rank reads its own.

A large tensor, or a MiB of small ones, travels in one message. `fully_shard` splits a dim as torch.chunk does, so the
last ranks may have fewer rows, or none; every message has room for those of rank 0. Example: tensors of (5, 4) and (3,)
on 2 ranks:

    rank 0    rows 0, 1, 2         elements 0, 1
    rank 1    rows 3, 4, unused    element 2, unused

With `fsdp.shard_columns` they are columns, as many on each rank.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite import progress
from torchtitan_lite.checkpointing import tensor_names
from torchtitan_lite.checkpointing.tensor_names import Tensors
from torchtitan_lite.distributed.exchange import on_all, on_rank0
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.distributed.sharding import is_sharded, own_part, shard_dim


def gather(
    tensors: Mapping[str, Tensor],
    mesh: DeviceMesh,
    take: Callable[[dict[str, Tensor]], None],
    untimed: dist.ProcessGroup | None,
) -> None:
    """Pass whole tensors to `take` on rank 0: each large one alone, small ones together. Collective, also its errors.

    Args:
        take: must not keep the tensors: their memory is used again.
        untimed: a group of all ranks without a timeout, to wait in for rank 0's disk; outside of a run the mesh's
            groups have one.
    """
    group, rank = mesh.get_group(mesh.ndim - 1), dist.get_rank()
    sizes = {name: _size(t, group) for name, t in tensors.items() if is_sharded(t) and group.size() > 1}
    parts = [(part, {name: sizes[name] for name in part if name in sizes}) for part in tensor_names.in_groups(tensors)]
    n_messages = 1 if rank else 1 + group.size()  # the own one and, on rank 0, those of all
    buffers = list[Tensor]()

    def make_buffer() -> None:
        if sizes and dist.get_global_rank(group, 0) == 0:  # the first replica
            longest = max(sum(of.values()) for _, of in parts)
            buffers.append(own_part(tensors[next(iter(sizes))])[0].new_empty(n_messages * longest, dtype=torch.uint8))

    def messages(of: Mapping[str, int]) -> Tensor:
        return buffers[0][: n_messages * sum(of.values())].view(n_messages, -1)

    def receive(part: Tensors, of: Mapping[str, int], whole: Tensors) -> None:
        if of:
            _unpack(part, whole, of, messages(of)[1:])
        take(whole)

    on_all(make_buffer, untimed)
    for part, of in parts:
        whole = {name: own_part(tensor)[0] for name, tensor in part.items()}
        if of and buffers:
            own, *of_ranks = messages(of)
            for name, data in zip(of, own.split([*of.values()]), strict=True):
                _put(whole[name], data)
            dist.gather(own, of_ranks or None, 0, group)
        on_rank0(partial(receive, part, of, whole), untimed)  # the others wait here for its disk, not in a message


def _unpack(tensors: Tensors, whole: Tensors, sizes: Mapping[str, int], messages: Tensor) -> None:
    """Replace rank 0's rows in `whole` by whole tensors."""
    for name, of_ranks in zip(sizes, messages.split([*sizes.values()], 1), strict=True):
        dim, own = shard_dim(tensors[name]), whole[name]
        rows = of_ranks.flatten().view(own.dtype).view(-1, *own.shape).movedim(0, dim)
        whole[name] = rows.flatten(dim, dim + 1).narrow(dim, 0, tensors[name].shape[dim])


def scatter(targets: Mapping[str, Tensor], read: Callable[[str], Tensor], mesh: DeviceMesh, process: Process) -> None:
    """Fill this rank's rows of tensors from the whole ones that `read` returns on rank 0. Collective, also its errors.

    Args:
        read: returns a tensor on the CPU, maybe of another dtype.
    """
    for part in tensor_names.in_groups(targets):
        _scatter_group(part, read, mesh, process)


def _scatter_group(
    targets: Mapping[str, Tensor], read: Callable[[str], Tensor], mesh: DeviceMesh, process: Process
) -> None:
    group = mesh.get_group(mesh.ndim - 1)
    sizes = [_size(target, group) for target in targets.values()]
    message, sent = torch.empty(sum(sizes), dtype=torch.uint8, device=process.device), list[Tensor]()

    def pack() -> None:
        messages = message.new_empty(group.size(), len(message))
        for (name, target), of_ranks in zip(targets.items(), messages.split(sizes, 1), strict=True):
            with progress.working(f"reading {name}"):
                whole, n = read(name).to(target.dtype), group.size()
                parts = whole.chunk(n, shard_dim(target)) if is_sharded(target) else [whole] * n
                for part, data in zip(parts, of_ranks, strict=False):  # the last ranks may have no rows
                    _put(part, data)
        sent.extend(messages)

    on_rank0(pack, process.untimed)  # the others wait here for a slow disk, not in a message with a time limit
    if dist.get_global_rank(group, 0) == 0:
        dist.scatter(message, sent or None, 0, group)
    if mesh.ndim > 1:  # from the first replica to the others
        replicas = mesh.get_group(0)
        dist.broadcast(message, dist.get_global_rank(replicas, 0), replicas)
    progress.advance(len(message))
    for target, data in zip(targets.values(), message.split(sizes), strict=True):
        own = own_part(target)[0]
        own.view(-1).view(torch.uint8).copy_(data[: own.nbytes])


def copy_rows(whole: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy this rank's rows from whole tensors on this rank, one tensor at a time, so `whole` may load lazily."""
    for name, target in targets.items():
        rows, first = own_part(target)
        dim = shard_dim(target)
        with progress.working(f"reading {name}"):
            rows.copy_(whole[name].narrow(dim, first, rows.shape[dim]))


def _size(tensor: Tensor, group: dist.ProcessGroup) -> int:
    """Return the bytes of rank 0's rows."""
    if not is_sharded(tensor):
        return tensor.nbytes
    rows = tensor.shape[shard_dim(tensor)]
    return tensor.nbytes // rows * math.ceil(rows / group.size())


def _put(tensor: Tensor, data: Tensor) -> None:
    """Copy a tensor's bytes to the beginning of `data`."""
    data[: tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
