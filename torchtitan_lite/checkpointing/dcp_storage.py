"""Storage of sharded checkpoints for torch.distributed.checkpoint (DCP): one safetensors file per rank, and an index.

DCP plans which rank writes and reads which part of a tensor. DCP's own storage keeps the plan in a pickle, which can
run code from a checkpoint. Here the plan is JSON:

    shard-00000-of-00004.safetensors     "model.output.weight@0,0" -> the rows of rank 0
    index.json                           name -> dtype, shape, and for each part: offsets, shape, file, key
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
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
from torchtitan_lite.checkpointing.safetensors_file import FileRecord, TensorSpecs, specs_of, write_tensors, write_text
from torchtitan_lite.checkpointing.storage import (
    MODEL,
    OPTIMIZER,
    open_tensors,
    read_json,
    read_manifest,
    read_specs,
)
from torchtitan_lite.checkpointing.tensor_names import prefix
from torchtitan_lite.errors import CheckpointError

INDEX = "index.json"


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
        copies: this rank's rows by name, written instead of the live tensors, which only make the plan.
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
        # the size (0) is only for DCP's metadata, which is not written
        return _done([WriteResult(item.index, 0, [file, key]) for key, item in items.items()])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, on the coordinator."""
        places = {result.index: result.storage_data for written in results for result in written}
        index = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), f"{name} is not a tensor"
            parts = []
            for chunk in entry.chunks:
                file, key = places[MetadataIndex(name, chunk.offsets)]
                parts.append({"offsets": list(chunk.offsets), "shape": list(chunk.sizes), "file": file, "key": key})
            index[name] = {"dtype": _name_of(entry.properties.dtype), "shape": list(entry.size), "parts": parts}
        self.records[INDEX] = write_text(self.folder / INDEX, json.dumps(index, indent=1) + "\n")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        for name, entry in read_json(self.folder / INDEX).items():
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


def read_index(folder: Path) -> dict[str, Any]:
    """Return dtype, shape and parts of each tensor of a full or sharded checkpoint, by sharded state dict name."""
    if read_manifest(folder).state_dict == "sharded":
        return read_json(folder / INDEX)
    index = {}
    for file in (MODEL, OPTIMIZER):
        for name, (dtype, shape) in read_specs(folder / file).items():
            part = {"offsets": [0] * len(shape), "shape": shape, "file": file, "key": name}
            index[f"{prefix(file)}{name}"] = {"dtype": _name_of(dtype), "shape": shape, "parts": [part]}
    return index


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


def read_tensors(folder: Path, *prefixes: str) -> LazyTensors:
    """Return the whole tensors of a full or sharded checkpoint under these prefixes, read lazily.

    Names lose their prefix. If two are then equal, the later prefix wins.
    """
    index = read_index(folder)
    entries = {n.removeprefix(p): entry for p in prefixes for n, entry in index.items() if n.startswith(p)}

    def read(name: str) -> Tensor:
        entry = entries[name]
        parts = [open_tensors(folder / part["file"]).get_tensor(part["key"]) for part in entry["parts"]]
        if len(parts) == 1:
            whole: Tensor = parts[0]
            return whole
        whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for part, rows in zip(entry["parts"], parts, strict=True):
            whole[_slices(part["offsets"], part["shape"])] = rows
        return whole

    return LazyTensors({n: (getattr(torch, e["dtype"]), tuple(e["shape"])) for n, e in entries.items()}, read)
