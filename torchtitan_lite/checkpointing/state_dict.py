"""Whole tensors on rank 0, from copies of each rank's rows: over a group of its own, so that training can continue."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.distributed.sharding import local_rows


def to_be_copied(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Those of which this rank has a part that nobody else has; rank 0 also has what is whole everywhere."""
    return {name: tensor for name, tensor in tensors.items() if _has_rows(tensor) or rank == 0}


class Gathering:
    """Called with a name, all ranks in the same order, it returns the whole tensor on rank 0.

    DTensor's `full_tensor` would use the group that training uses, where it may only run in turn.

    Args:
        tensors: the live ones; only their shapes are looked at.
        copies: of `to_be_copied`: this rank's rows of each, on the CPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self._copies = copies
        self._group = group
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._mine = {
            name: (local_rows(tensor)[1], len(copies[name]))
            for name, tensor in tensors.items()
            if _has_rows(tensor) and len(copies[name])
        }
        self._places: list[dict[str, tuple[int, int]]] = []

    def __call__(self, name: str) -> Tensor:
        """The whole tensor on rank 0, an empty one elsewhere."""
        if not self._places:
            self._places = [{} for _ in range(dist.get_world_size(self._group))]
            dist.all_gather_object(self._places, self._mine, group=self._group)
        if dist.get_rank(self._group) != 0:
            if name in self._mine:
                dist.send(self._copies[name], dst=0, group=self._group)
            return torch.empty(0)
        copy = self._copies[name]
        others = [(rank, *places[name]) for rank, places in enumerate(self._places) if rank and name in places]
        if not others:
            return copy
        whole = torch.empty(self._shapes[name], dtype=copy.dtype)
        coming = [dist.irecv(whole[first : first + n], src=rank, group=self._group) for rank, first, n in others]
        whole[: len(copy)] = copy
        for work in coming:
            assert work is not None
            work.wait()
        return whole


def _has_rows(tensor: Tensor) -> bool:
    """Whether this rank's part is a part of the first copy of the model, which is the one that is gathered."""
    if not isinstance(tensor, DTensor) or not tensor.ndim:
        return False
    axes = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return all(placement.is_shard() or coordinate == 0 for coordinate, placement in axes)
