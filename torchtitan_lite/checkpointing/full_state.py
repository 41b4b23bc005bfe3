"""Full state dicts: rank 0 gathers whole tensors and writes them, or sends each rank its rows of them."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.checkpointing.safetensors_file import FileRecord, TensorSpecs, layout, write_tensors
from torchtitan_lite.checkpointing.tensor_names import prefix
from torchtitan_lite.distributed.agreement import from_all_ranks, outcome_on_rank0
from torchtitan_lite.distributed.sharding import local_rows, shard_dim
from torchtitan_lite.errors import CheckpointError

PIECE = 64 << 20  # bytes that are sent at a time


# --- saving -----------------------------------------------------------------------------------------------------


def write_gathered(
    folder: Path, files: Mapping[str, TensorSpecs], gather: Callable[[str], Tensor], *, writes: bool
) -> dict[str, FileRecord]:
    """Gather one whole tensor at a time, and write it on rank 0. Collective.

    Args:
        files: the tensors of each file.
        gather: a collective; returns the tensor with this prefixed name ("model.norm.weight") on rank 0.
        writes: whether this is rank 0.

    Raises:
        Exception: the first error of this rank. It is raised after all tensors are gathered, because the other ranks
            take part in each gather and do not know of the error.
    """
    records: dict[str, FileRecord] = {}
    errors: list[Exception] = []

    @contextlib.contextmanager
    def collecting_errors() -> Iterator[None]:
        try:
            yield
        except Exception as error:  # any error, also no memory
            errors.append(error)

    for file, specs in files.items():
        names = iter([f"{prefix(file)}{name}" for name in layout(specs)[1]])

        def gather_next(_: str, names: Iterator[str] = names) -> Tensor:
            return gather(next(names))

        if writes and not errors:
            with collecting_errors():
                records[file] = write_tensors(folder / file, specs, gather_next)
        for name in names:  # of other ranks, or after an error
            with collecting_errors():
                gather(name)
    if errors:
        raise errors[0]
    return records


def needed_copies(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The tensors that this rank has to copy: its shards, and on rank 0 also what is replicated."""
    return {name: tensor for name, tensor in tensors.items() if _has_rows(tensor) or rank == 0}


class HostGather:
    """Gathers tensors by name; all ranks call it in the same order.

    It has its own group. `full_tensor` would use training's, whose collectives have to keep their order.

    Args:
        tensors: the live tensors; only their shapes are used.
        copies: this rank's parts of `needed_copies`, on the CPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        self._copies = copies
        self._group = group
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self._mine = {
            name: (shard_dim(tensor), local_rows(tensor)[1], copies[name].shape[shard_dim(tensor)])
            for name, tensor in tensors.items()
            if _has_rows(tensor) and copies[name].numel()
        }
        self._places: list[dict[str, tuple[int, int, int]]] = []

    def __call__(self, name: str) -> Tensor:
        """The whole tensor on rank 0, an empty one elsewhere. Raises CheckpointError if rank 0 has no memory for it."""
        if not self._places:
            self._places = from_all_ranks(self._mine, self._group)
        rank = dist.get_rank(self._group)
        others = [(i, *places[name]) for i, places in enumerate(self._places) if i and name in places]
        if not others:
            return self._copies[name] if rank == 0 else torch.empty(0)
        whole = torch.empty(0)

        def allocate() -> None:
            nonlocal whole
            whole = torch.empty(self._shapes[name], dtype=self._copies[name].dtype)

        # before anything is sent: a rank that sends waits for rank 0
        _, error = outcome_on_rank0(rank, allocate, self._group)
        if error:
            raise CheckpointError(f"rank 0: {error}")
        if rank != 0:
            if name in self._mine:
                dist.send(self._copies[name], dst=0, group=self._group)
            return whole
        copy = self._copies[name]
        places = [whole.narrow(dim, first, n) for _, dim, first, n in others]
        # columns of a row are not contiguous: they are received into a tensor of their own
        parts = [place if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype) for place in places]
        coming = [dist.irecv(part, src=other[0], group=self._group) for part, other in zip(parts, others, strict=True)]
        dim = others[0][1]
        whole.narrow(dim, 0, copy.shape[dim]).copy_(copy)
        for work, place, part in zip(coming, places, parts, strict=True):
            assert work is not None
            work.wait()
            if part is not place:
                place.copy_(part)
        return whole


def _has_rows(tensor: Tensor) -> bool:
    """Whether this rank holds rows of the first copy of the model, the one that is gathered."""
    if not isinstance(tensor, DTensor) or not tensor.ndim:
        return False
    axes = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return all(placement.is_shard() or coordinate == 0 for coordinate, placement in axes)


# --- loading ----------------------------------------------------------------------------------------------------


def broadcast_rows(whole: Tensor | None, target: Tensor, buffer: Tensor) -> None:
    """Fill this rank's rows of a tensor from rank 0's whole one. Collective.

    Args:
        whole: on the CPU of rank 0, None elsewhere.
        buffer: (PIECE,) uint8 on the ranks' devices. All pieces go through it, so nothing else is allocated.
    """
    shard, first = local_rows(target)
    dim = shard_dim(target)
    # (rows, width): with dim 0 all is one row, of which this rank has the elements `first` to `last`
    width, first = math.prod(target.shape[dim:]), first * math.prod(target.shape[dim + 1 :])
    last = first + math.prod(shard.shape[dim:])
    local = shard.view(-1, last - first) if last > first else None
    pieces = buffer.view(target.dtype)
    start = 0
    while start < target.numel():  # a piece is some whole rows, or a part of one
        row, column = divmod(start, width)
        whole_rows = len(pieces) // width * width
        piece = pieces[: min(whole_rows, target.numel() - start) or min(len(pieces), width - column)]
        if whole is not None:
            piece.copy_(whole.view(-1)[start : start + len(piece)])
        dist.broadcast(piece.view(torch.uint8), src=0)  # gloo has no int16
        rows = piece.view(-1, min(len(piece), width))
        begin, end = max(first, column), min(last, column + rows.shape[1])
        if local is not None and begin < end:
            local[row : row + len(rows), begin - first : end - first].copy_(rows[:, begin - column : end - column])
        start += len(piece)
        progress.advance(piece.nbytes)


def copy_rows(whole: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Fill this rank's rows from whole tensors that it can read itself. Lazy ones are read one at a time."""
    for name, target in targets.items():
        rows, first = local_rows(target)
        dim = shard_dim(target)
        with progress.working(f"reading {name}"):
            rows.copy_(whole[name].narrow(dim, first, rows.shape[dim]))
