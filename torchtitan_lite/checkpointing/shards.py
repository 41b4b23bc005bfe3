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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.checkpointing.safetensors_file import (
    DTYPES,
    WRITABLE,
    FileRecord,
    TensorSpecs,
    specs_of,
    write_tensors,
)
from torchtitan_lite.checkpointing.storage import MODEL, OPTIMIZER, open_tensors, read_json, read_manifest, read_specs
from torchtitan_lite.checkpointing.tensor_names import Tensors, prefix, renamed
from torchtitan_lite.distributed.sharding import own_part, shard_dim, shard_range
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

    @property
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
        split = isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)
        replica = n_bytes.index(min(n_bytes)) if split else 0
        n_bytes[replica] += tensor.nbytes
        entries[name] = WRITABLE[tensor.dtype], [*tensor.shape], shard_dim(tensor) if split else None, replica
    return Layout([len(n_bytes), mesh[-1]], {name: entries[name] for name in tensors})


def read_places(folder: Path) -> Layout | Listed:
    """Return where the tensors of a full or sharded checkpoint are, by sharded state dict name."""
    manifest = read_manifest(folder)
    if manifest.layout is not None:
        return Layout(**manifest.layout)
    specs, listed = {}, dict[str, list[Part]]()
    if manifest.state_dict == "sharded":
        for name, entry in read_json(folder / INDEX).items():
            specs[renamed(name)] = getattr(torch, entry["dtype"]), tuple(entry["shape"])
            listed[renamed(name)] = [
                Part(part["file"], part["key"], box_of(part["offsets"], part["shape"])) for part in entry["parts"]
            ]
        return Listed(specs, listed)
    rename = renamed if manifest.format_version == 6 else str
    for file in (MODEL, OPTIMIZER):
        for key, (dtype, shape) in read_specs(folder / file).items():
            name = rename(prefix(file) + key)
            specs[name] = dtype, shape
            listed[name] = [Part(file, key, box_of([0] * len(shape), shape))]
    return Listed(specs, listed)


def write_rows(
    path: Path, boxes: Mapping[str, Box], specs: TensorSpecs, rows: Callable[[str], Tensor]
) -> dict[str, FileRecord]:
    """Write parts of tensors into a file of torch's layout. Without parts, no file: torch's tools refuse empty ones."""
    if not boxes:
        return {}
    offsets = {name: {"saved_offsets": [indices.start for indices in box]} for name, box in boxes.items()}
    parts = {name: (specs[name][0], tuple(map(len, box))) for name, box in boxes.items()}
    try:
        return {path.name: write_tensors(path, parts, rows, metadata={INFO: json.dumps(offsets)})}
    except FileNotFoundError as error:
        raise CheckpointError(
            f'{error} (is it on a file system that all ranks share? checkpoint.state_dict = "full" needs none)'
        ) from error


class Reads:
    """The parts that this rank's tensors need, by file.

    Args:
        targets: by sharded state dict name.
    """

    def __init__(self, folder: Path, places: Layout | Listed, targets: Mapping[str, Tensor]) -> None:
        self._folder, self._targets = folder, targets
        self.files: dict[str, list[tuple[str, Part]]] = {}
        for name, target in targets.items():
            own = own_box(target)
            for part in places.parts(name, own) if all(own) else ():
                if all(overlap(part.box, own)):
                    self.files.setdefault(part.file, []).append((name, part))

    def check(self) -> None:
        """Raise CheckpointError if a header contradicts the manifest."""
        for name, parts in self.files.items():
            with progress.working(f"reading the header of {name}"), open_tensors(self._folder / name) as file:
                info = json.loads((file.metadata() or {}).get(INFO, "{}"))
                for _, (_, key, box) in parts:
                    offsets = info[key]["saved_offsets"] if key in info else [indices.start for indices in box]
                    if box_of(offsets, file.get_slice(key).get_shape()) != box:
                        raise CheckpointError(f"{self._folder / name}: {key} is not the part that the manifest says")

    @torch.no_grad()
    def read(self) -> None:
        """Copy the parts into the targets."""
        for name, parts in self.files.items():
            with (
                progress.working(f"reading its rows of {self._folder.name}"),
                open_tensors(self._folder / name) as file,
            ):
                for target, (_, key, box) in parts:
                    own, common = own_box(self._targets[target]), overlap(own_box(self._targets[target]), box)
                    rows = own_part(self._targets[target])[0][within(common, own)]
                    rows.copy_(file.get_slice(key)[within(common, box)] if common else file.get_tensor(key))
                    progress.advance(rows.nbytes)


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of known dtypes and shapes, made on access."""

    def __init__(self, specs: TensorSpecs, make: Callable[[str], Tensor]) -> None:
        self.specs, self._make = specs, make

    def __getitem__(self, name: str) -> Tensor:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def specs(tensors: Mapping[str, Tensor]) -> TensorSpecs:
    """Return dtypes and shapes, without reading lazy tensors."""
    return tensors.specs if isinstance(tensors, LazyTensors) else specs_of(tensors)


def read_tensors(folder: Path, start: str = "") -> LazyTensors:
    """Return the whole tensors of a full or sharded checkpoint whose names begin with `start`, read lazily.

    Names lose `start`.
    """
    places, opened = read_places(folder), functools.cache(open_tensors)

    def read(name: str) -> Tensor:
        dtype, shape = places.specs[start + name]
        parts = [*places.parts(start + name, box_of([0] * len(shape), shape))]
        if len(parts) == 1 and all(parts[0].box):
            whole: Tensor = opened(folder / parts[0].file).get_tensor(parts[0].key)
            return whole
        whole = torch.empty(shape, dtype=dtype)
        Reads(folder, places, {start + name: whole}).read()
        return whole

    return LazyTensors({n.removeprefix(start): spec for n, spec in places.specs.items() if n.startswith(start)}, read)
