"""Storage of sharded checkpoints for torch.distributed.checkpoint (DCP): one safetensors file per rank, and an index.

DCP plans which rank writes and reads which part of a tensor. Its own storage keeps the plan in a pickle, which can run
code from a checkpoint. Here it is JSON:

    shard-00000-of-00004.safetensors     "model.output.weight@0,0" -> the rows of rank 0
    index.json                           name -> dtype, shape, and for each part: offsets, shape, file, key
"""

import abc
import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.checkpointing.safetensors_file import (
    WRITABLE,
    FileRecord,
    TensorSpecs,
    specs_of,
    write_tensors,
    write_text,
)
from torchtitan_lite.checkpointing.storage import open_tensors, read_json, read_shapes
from torchtitan_lite.errors import CheckpointError, shortened

INDEX = "index.json"
DTYPES = {str(dtype).removeprefix("torch.") for dtype in WRITABLE}


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class _NothingToPrepare:
    """The steps of DCP's storage that ours does not need."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class ShardWriter(_NothingToPrepare, StorageWriter):
    """Writes this rank's parts into an existing folder. `records` then has the written files.

    Args:
        copies: this rank's rows by name, to write instead of the live tensors, which then only make the plan.
    """

    def __init__(self, folder: Path, copies: Mapping[str, Tensor] | None = None) -> None:
        self.folder = folder
        self.copies = copies
        self.records: dict[str, FileRecord] = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = (f"shard-{rank:05d}-of-{len(plans):05d}.safetensors" for rank in range(len(plans)))
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        file = plan.storage_data
        items = {_key(item): item for item in plan.items}
        specs = {key: _spec(item) for key, item in items.items()}

        def rows(key: str) -> Tensor:
            item = items[key]
            tensor = planner.resolve_data(item) if self.copies is None else self.copies[item.index.fqn]
            assert isinstance(tensor, Tensor)
            return tensor.detach().cpu()

        try:
            self.records[file] = write_tensors(self.folder / file, specs, rows, ahead=0)
        except FileNotFoundError as error:
            raise CheckpointError(
                f'{error} (is it on a file system that all ranks share? checkpoint.state_dict = "full" needs none)'
            ) from error
        # the size is for DCP's own metadata, which is not written
        return _done([WriteResult(item.index, 0, [file, key]) for key, item in items.items()])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, on the coordinator."""
        places = {result.index: result.storage_data for written in results for result in written}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), f"{name} is not a tensor"
            parts = []
            for chunk in entry.chunks:
                file, key = places[MetadataIndex(name, chunk.offsets)]
                parts.append({"offsets": list(chunk.offsets), "shape": list(chunk.sizes), "file": file, "key": key})
            tensors[name] = entry.properties.dtype, entry.size, parts
        self.records[INDEX] = _write_index(self.folder, tensors)


def _key(item: WriteItem) -> str:
    offsets = item.tensor_data.chunk.offsets if item.tensor_data else ()
    return f"{item.index.fqn}@{','.join(map(str, offsets))}"


def _spec(item: WriteItem) -> tuple[torch.dtype, tuple[int, ...]]:
    assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
    return item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)


def _slices(offsets: Iterable[int], sizes: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


class ShardReader(_NothingToPrepare, StorageReader):
    """Reads only the rows that this rank needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[MetadataIndex, tuple[str, str]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, entry in read_index(self.folder).items():
            chunks = []
            for part in entry["parts"]:
                offsets, sizes = torch.Size(part["offsets"]), torch.Size(part["shape"])
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                self._places[MetadataIndex(name, offsets)] = part["file"], part["key"]
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, Any] = {}
        with progress.working(f"reading its rows of {self.folder.name}"):
            for item in plan.items:
                file, key = self._places[item.storage_index]
                if file not in files:
                    files[file] = open_tensors(self.folder / file)
                target = planner.resolve_tensor(item).detach()
                if target.ndim == 0:
                    target.copy_(files[file].get_tensor(key))
                elif target.numel():
                    target.copy_(files[file].get_slice(key)[_slices(item.storage_offsets, item.lengths)])
                planner.commit_tensor(item, target)
                progress.advance(target.nbytes)
        return _done(None)


def write_whole(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, FileRecord]:
    """Write whole tensors as a sharded checkpoint of one rank."""
    file = "shard-00000-of-00001.safetensors"
    keys = {name: f"{name}@{','.join('0' * tensor.ndim)}" for name, tensor in tensors.items()}
    index = {}
    for name, tensor in tensors.items():
        part = {"offsets": [0] * tensor.ndim, "shape": list(tensor.shape), "file": file, "key": keys[name]}
        index[name] = tensor.dtype, tensor.shape, [part]
    by_key = {keys[name]: tensor for name, tensor in tensors.items()}
    record = write_tensors(folder / file, specs_of(by_key), by_key.__getitem__)
    return {file: record, INDEX: _write_index(folder, index)}


def _write_index(
    folder: Path, tensors: Mapping[str, tuple[torch.dtype, torch.Size, list[dict[str, Any]]]]
) -> FileRecord:
    """Write the index, from the dtype, shape and parts of each tensor."""
    content = {
        name: {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "parts": parts}
        for name, (dtype, shape, parts) in tensors.items()
    }
    return write_text(folder / INDEX, json.dumps(content, indent=1) + "\n")


def read_index(folder: Path) -> dict[str, Any]:
    """The index: by tensor name its dtype, shape and parts.

    Raises:
        CheckpointError: it is damaged, or the parts of a tensor do not add up to its shape.
    """
    path = folder / INDEX
    content = read_json(path)
    try:
        for name, entry in content.items():
            shape, parts = _sizes(entry["shape"]), entry["parts"]
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} has the dtype {entry['dtype']}")
            if sum(math.prod(_sizes(part["shape"])) for part in parts) != math.prod(shape):
                raise ValueError(f"the parts of {name} do not add up to its shape {shape}")
            for part in parts:
                _require_part(name, shape, part)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {shortened(error)}") from None
    return content


def _sizes(value: Any) -> list[int]:
    """Validate sizes or offsets."""
    if not isinstance(value, list) or any(type(n) is not int or not 0 <= n < 2**62 for n in value):
        raise ValueError(f"{shortened(value)} should be a list of sizes")
    return value


def _require_part(name: str, shape: list[int], part: Mapping[str, Any]) -> None:
    file, key, offsets, sizes = part["file"], part["key"], _sizes(part["offsets"]), _sizes(part["shape"])
    if not isinstance(key, str) or Path(file).name != file or file.startswith("."):
        raise ValueError(f"{name} is in {file!r}, which is not a plain file of its folder")
    if not len(offsets) == len(sizes) == len(shape) or any(
        offset + size > n for offset, size, n in zip(offsets, sizes, shape, strict=True)
    ):
        raise ValueError(f"{name} of shape {shape} has no part of shape {sizes} at {offsets}")


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor. Errors: see `read_checked_index`."""
    return {name: tuple(entry["shape"]) for name, entry in read_checked_index(folder).items()}


def read_checked_index(folder: Path) -> dict[str, Any]:
    """The index, checked against the headers of all shards.

    Raises:
        CheckpointError: the index or a file is damaged, or a file lacks a part.
    """
    index = read_index(folder)
    parts = [part for entry in index.values() for part in entry["parts"]]
    headers = {file: read_shapes(folder / file) for file in {part["file"] for part in parts}}
    for part in parts:
        if headers[part["file"]].get(part["key"]) != tuple(part["shape"]):
            raise CheckpointError(f"{folder / part['file']} does not hold {part['key']} of shape {part['shape']}")
    return index


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are made on access, of known dtypes and shapes."""

    @abc.abstractmethod
    def specs(self) -> TensorSpecs:
        """Dtypes and shapes."""


class WholeTensors(LazyTensors):
    """The tensors of a sharded checkpoint whose names start with a prefix, read lazily and whole."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder = folder
        index = read_checked_index(folder)
        self._entries = {n.removeprefix(prefix): e for n, e in index.items() if n.startswith(prefix)}

    def specs(self) -> TensorSpecs:
        return {name: (getattr(torch, e["dtype"]), tuple(e["shape"])) for name, e in self._entries.items()}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for part in entry["parts"]:
            try:
                tensor = open_tensors(self._folder / part["file"]).get_tensor(part["key"])
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self._folder / part['file']} can't be read: {error}") from None
            whole[_slices(part["offsets"], part["shape"])] = tensor
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __or__(self, others: "WholeTensors") -> "WholeTensors":
        """These tensors of a checkpoint, replaced by others of it with the same names."""
        both = copy.copy(self)
        both._entries = self._entries | others._entries
        return both


def specs(tensors: Mapping[str, Tensor]) -> TensorSpecs:
    """Dtypes and shapes, without reading lazy tensors."""
    return tensors.specs() if isinstance(tensors, LazyTensors) else specs_of(tensors)
