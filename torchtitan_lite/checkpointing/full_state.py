"""Full state dicts: rank 0 gathers whole tensors and sends each rank its rows; or each rank reads its own.

All tensors of a call travel in one message. `fully_shard` splits a dim as torch.chunk does, so the last ranks may have
fewer rows, or none, but all have as much room in a message. Example: tensors of (5, 4) and (3,) on 2 ranks:

    rank 0    rows 0, 1, 2       elements 0, 1
    rank 1    rows 3, 4, room    element 2, room

With `fsdp.shard_columns` they are columns, as many on each rank.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.distributed.sharding import own_part, shard_dim


def gather(tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return whole tensors on rank 0, and this rank's rows elsewhere. Collective of the first replica's ranks."""
    group, result = mesh.get_group(mesh.ndim - 1), {name: own_part(tensor)[0] for name, tensor in tensors.items()}
    sharded = {name: tensor for name, tensor in tensors.items() if _is_sharded(tensor)}
    if not sharded or group.size() == 1 or dist.get_global_rank(group, 0) > 0:
        return result
    sizes = [_size(tensor, group) for tensor in sharded.values()]
    message = next(iter(result.values())).new_empty(sum(sizes), dtype=torch.uint8)
    for name, data in zip(sharded, message.split(sizes), strict=True):
        _put(result[name], data)
    messages = message.new_empty(group.size() if dist.get_rank() == 0 else 0, len(message))
    dist.gather(message, [*messages] or None, 0, group)
    if len(messages) > 0:
        for (name, tensor), of_ranks in zip(sharded.items(), messages.split(sizes, 1), strict=True):
            dim, own = shard_dim(tensor), result[name]
            parts = of_ranks.flatten().view(own.dtype).view(-1, *own.shape).movedim(0, dim)
            result[name] = parts.flatten(dim, dim + 1).narrow(dim, 0, tensor.shape[dim])
    return result


def scatter(whole: Mapping[str, Tensor], targets: Mapping[str, Tensor], mesh: DeviceMesh, device: torch.device) -> None:
    """Fill this rank's rows of tensors from the whole ones on rank 0. Collective.

    Args:
        whole: on the CPU of rank 0, maybe of other dtypes; empty elsewhere.
        device: for the message.
    """
    group = mesh.get_group(mesh.ndim - 1)
    sizes = [_size(target, group) for target in targets.values()]
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    messages = message.new_empty(group.size() if whole else 0, len(message))
    if whole:
        for (name, target), of_ranks in zip(targets.items(), messages.split(sizes, 1), strict=True):
            for part, data in zip(_parts(whole[name].to(target.dtype), target, group), of_ranks, strict=False):
                _put(part, data)
    if dist.get_global_rank(group, 0) == 0:
        dist.scatter(message, [*messages] or None, 0, group)
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


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def _size(tensor: Tensor, group: dist.ProcessGroup) -> int:
    """Return the bytes of rank 0's rows."""
    if not _is_sharded(tensor):
        return tensor.nbytes
    rows = tensor.shape[shard_dim(tensor)]
    return tensor.nbytes // rows * math.ceil(rows / group.size())


def _parts(whole: Tensor, target: Tensor, group: dist.ProcessGroup) -> Sequence[Tensor]:
    """Return each rank's rows; the last ranks may have none."""
    return whole.chunk(group.size(), shard_dim(target)) if _is_sharded(target) else [whole] * group.size()


def _put(tensor: Tensor, data: Tensor) -> None:
    """Copy a tensor's bytes to the beginning of `data`."""
    data[: tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
