"""Whole tensors on rank 0, out of copies of each rank's rows: by a group of its own, so that training can go on."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.init import local_rows


class Gathering:
    """Called with a name, all ranks in the same order, it returns the whole tensor on rank 0.

    DTensor's `full_tensor` would use the group that training uses, where it may only run in turn.

    Args:
        tensors: the live ones; only their shapes are looked at.
        copies: this rank's rows of each, on the CPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self._copies = copies
        self._group = group
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._first = {name: local_rows(tensor)[1] for name, tensor in tensors.items() if _has_rows(tensor)}
        self._places: list[dict[str, tuple[int, int]]] = []

    def __call__(self, name: str) -> Tensor:
        """The whole tensor on rank 0, an empty one elsewhere."""
        if not self._places:
            mine = {name: (first, len(self._copies[name])) for name, first in self._first.items()}
            self._places = [{} for _ in range(dist.get_world_size(self._group))]
            dist.all_gather_object(self._places, mine, group=self._group)
        rank, copy = dist.get_rank(self._group), self._copies[name]
        if rank != 0:
            if len(copy.shape) and self._places[rank].get(name, (0, 0))[1]:
                dist.send(copy, dst=0, group=self._group)
            return torch.empty(0)
        others = [(r, *places[name]) for r, places in enumerate(self._places) if r and places.get(name, (0, 0))[1]]
        if not others:
            return copy
        whole = torch.empty(self._shapes[name], dtype=copy.dtype)
        coming = [dist.irecv(whole[first : first + n], src=r, group=self._group) for r, first, n in others]
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
