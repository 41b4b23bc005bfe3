"""Which file has which part of a tensor, and the reading and writing of parts.

A sharded checkpoint has one safetensors file per writing rank, in torch's layout: each file has a tensor at most once,
and the header says where its part begins. Who writes what follows from shape, mesh and placement, so ranks exchange
nothing. Example: "model.w" of (5, 4) on 2 replicas x 2 shards, written by replica 1:

    shard-00002-of-00004.safetensors     "model.w": rows 0, 1, 2     saved_offsets [0, 0]
    shard-00003-of-00004.safetensors     "model.w": rows 3, 4        saved_offsets [3, 0]

The manifest keeps the mesh, and each tensor's dtype, shape, split dim and replica; a reader computes the rest. Format 6
had the parts in an index.json.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_lite import progress
from torchtitan_lite.checkpointing.safetensors_file import (
    DTYPES,
    WRITABLE,
    FileRecord,
    LazyTensors,
    TensorSpecs,
    write_tensors,
)
from torchtitan_lite.checkpointing.storage import (
    MODEL,
    OPTIMIZER,
    open_tensors,
    read_json,
    read_manifest,
    read_specs,
    reading,
)
from torchtitan_lite.checkpointing.tensor_names import Tensors, prefix, renamed
from torchtitan_lite.distributed.sharding import is_sharded, own_part, shard_dim, shard_range
from torchtitan_lite.errors import CheckpointError

INDEX = "index.json"  # of format 6
INFO = "DCP_SHARDING_INFO"  # torch's key in a header

Box = tuple[range, ...]  # a part of a tensor: its indices in each dim


def box_of(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple(range(first, first + size) for first, size in zip(offsets, sizes, strict=True))


def overlap(one: Box, other: Box) -> Box:
    return tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))


def within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Return where a part lies in a tensor that holds only the box `whole`."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(part, whole, strict=True))


def own_box(tensor: Tensor) -> Box:
    """Return this rank's part of a tensor."""
    rows, first = own_part(tensor)
    return box_of([first * (dim == shard_dim(tensor)) for dim in range(tensor.ndim)], rows.shape)


class Part(NamedTuple):
    """A part of a tensor, in a file under a key."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class Listed:
    """The parts in full checkpoints, and in sharded ones of format 6."""

    specs: TensorSpecs
    listed: Mapping[str, Sequence[Part]]

    def parts(self, name: str, _wanted: Box) -> Iterator[Part]:
        return iter(self.listed[name])


@dataclass(frozen=True)
class Layout:
    """The parts in a sharded checkpoint, computed by `shard_range`.

    Args:
        mesh: replicas, shards.
        tensors: by name: dtype, shape, split dim (None: unsharded, in rank 0's file), and the replica that writes it.
    """

    mesh: Sequence[int]
    tensors: Mapping[str, tuple[str, Sequence[int], int | None, int]]

    @functools.cached_property
    def specs(self) -> TensorSpecs:
        return {name: (DTYPES[dtype], tuple(shape)) for name, (dtype, shape, _, _) in self.tensors.items()}

    def file(self, rank: int) -> str:
        return f"shard-{rank:05d}-of-{self.mesh[0] * self.mesh[1]:05d}.safetensors"

    def box(self, name: str, shard: int) -> Box:
        """Return a shard's part."""
        _, shape, dim, _ = self.tensors[name]
        box = [range(size) for size in shape]
        if dim is not None:
            box[dim] = shard_range(shape[dim], self.mesh[1], shard)
        return tuple(box)

    def of_rank(self, rank: int) -> dict[str, Box]:
        """Return the parts that a rank writes, without empty ones, by name."""
        replica, shard = divmod(rank, self.mesh[1])
        own = (n for n, (_, _, dim, r) in self.tensors.items() if r == replica and (shard == 0 or dim is not None))
        return {name: box for name in own if all(box := self.box(name, shard))}

    def parts(self, name: str, wanted: Box) -> Iterator[Part]:
        """Yield the parts that overlap a box."""
        _, _, dim, replica = self.tensors[name]
        shards = range(1)
        if dim is not None:
            per_shard = len(self.box(name, 0)[dim]) or 1
            shards = range(wanted[dim].start // per_shard, -(-wanted[dim].stop // per_shard))
        for shard in shards:
            yield Part(self.file(replica * self.mesh[1] + shard), name, self.box(name, shard))


def layout_of(tensors: Tensors, mesh: Sequence[int]) -> Layout:
    """Return the layout of a save: each tensor, large ones first, goes to the replica with the fewest bytes so far."""
    n_bytes, entries = [0] * (mesh[0] if len(mesh) > 1 else 1), {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        if tensor.dtype not in WRITABLE:
            raise CheckpointError(f"{name} has the dtype {tensor.dtype}, which a checkpoint can't hold")
        split = is_sharded(tensor)
        replica = n_bytes.index(min(n_bytes)) if split else 0
        n_bytes[replica] += tensor.nbytes
        entries[name] = WRITABLE[tensor.dtype], [*tensor.shape], shard_dim(tensor) if split else None, replica
    return Layout([len(n_bytes), mesh[-1]], {name: entries[name] for name in tensors})


def read_places(folder: Path) -> Layout | Listed:
    """Return where the tensors of a full or sharded checkpoint are, by sharded state dict name."""
    manifest = read_manifest(folder)
    if manifest.layout is not None:
        return Layout(**manifest.layout)
    found: dict[str, tuple[torch.dtype, Sequence[int], list[Part]]]
    if manifest.state_dict == "sharded":
        found = {
            name: (
                getattr(torch, entry["dtype"]),
                entry["shape"],
                [Part(part["file"], part["key"], box_of(part["offsets"], part["shape"])) for part in entry["parts"]],
            )
            for name, entry in read_json(folder / INDEX).items()
        }
    else:
        found = {
            prefix(file) + key: (dtype, shape, [Part(file, key, tuple(map(range, shape)))])
            for file in (MODEL, OPTIMIZER)
            for key, (dtype, shape) in read_specs(folder / file).items()
        }
    rename = renamed if manifest.format_version == 6 else str
    return Listed(
        {rename(name): (dtype, tuple(shape)) for name, (dtype, shape, _) in found.items()},
        {rename(name): parts for name, (_, _, parts) in found.items()},
    )


def write_rows(folder: Path, layout: Layout, rank: int, rows: Callable[[str], Tensor]) -> dict[str, FileRecord]:
    """Write a rank's file, in torch's layout. Without rows, no file: torch's tools refuse empty ones."""
    boxes, file = layout.of_rank(rank), layout.file(rank)
    if not boxes:
        return {}
    offsets = {name: {"saved_offsets": [indices.start for indices in box]} for name, box in boxes.items()}
    parts = {name: (layout.specs[name][0], tuple(map(len, box))) for name, box in boxes.items()}
    return {file: write_tensors(folder / file, parts, rows, metadata={INFO: json.dumps(offsets)})}


class Reads:
    """The parts that this rank's tensors need, by file.

    Args:
        targets: by sharded state dict name.
    """

    def __init__(self, folder: Path, places: Layout | Listed, targets: Mapping[str, Tensor]) -> None:
        self.folder, self.places, self.targets = folder, places, targets
        self.files: dict[str, list[tuple[str, Part]]] = {}
        for name, target in targets.items():
            own = own_box(target)
            for part in places.parts(name, own):
                if all(overlap(part.box, own)):
                    self.files.setdefault(part.file, []).append((name, part))

    def read(self) -> None:
        """Copy the parts into the targets."""
        for name, parts in self.files.items():
            with reading(self.folder / name), open_tensors(self.folder / name) as file:
                for target, part in parts:
                    copy_part(file, part, self.targets[target])


@torch.no_grad()
def copy_part(file: Any, part: Part, target: Tensor) -> None:
    """Copy what a target needs of a part, from its opened file."""
    own, common = own_box(target), overlap(own_box(target), part.box)
    rows = own_part(target)[0][within(common, own)]
    rows.copy_(file.get_slice(part.key)[within(common, part.box)] if common else file.get_tensor(part.key))
    progress.advance(rows.nbytes)


def read_tensors(folder: Path, start: str = "") -> LazyTensors:
    """Return the whole tensors of a full or sharded checkpoint whose names begin with `start`, read lazily.

    Names lose `start`.
    """
    places, opened = read_places(folder), functools.cache(open_tensors)

    def read(name: str) -> Tensor:
        dtype, shape = places.specs[start + name]
        parts = [part for part in places.parts(start + name, tuple(map(range, shape))) if all(part.box)]
        if len(parts) == 1:
            mapped: Tensor = opened(folder / parts[0].file).get_tensor(parts[0].key)
            return mapped
        whole = torch.empty(shape, dtype=dtype)
        for part in parts:
            copy_part(opened(folder / part.file), part, whole)
        return whole

    return LazyTensors({n.removeprefix(start): spec for n, spec in places.specs.items() if n.startswith(start)}, read)
