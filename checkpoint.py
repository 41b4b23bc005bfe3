"""Save and load an FSDP2 model and its optimizer: two APIs, two kinds of state dict, the same files.

FSDP2's parameters and AdamW's moments are DTensors: each rank holds some of the rows.

    state_dict   api       saving                                             loading
    full         dtensor   full_tensor(), tensor by tensor                    broadcast(), tensor by tensor
    full         dcp       get_model_state_dict, get_optimizer_state_dict     set_model_state_dict, set_optimizer_...
    sharded      dtensor   dcp.save of the dict of DTensors                   dcp.load into the dict of DTensors
    sharded      dcp       get_state_dict, then dcp.save                      dcp.load, then set_state_dict

Full: rank 0 alone writes and reads whole tensors. No shared file system is needed.
Sharded: every rank writes and reads its own rows. Nothing is gathered.
Each of the four ways loads what any other has written, on any world size. The dtensor way shows each step and is the
place to customise; the dcp way leaves the work to torch.

checkpointing/storage.py defines when a checkpoint is complete, select.py which one is loaded, save.py how a save runs
in the background. Command line: `python checkpoint.py verify | inspect | convert | export | import`.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpointing import progress, storage
from torchtitan_lite.checkpointing.compatibility import optimizer_as_saved, with_defaults
from torchtitan_lite.checkpointing.progress import on_rank0
from torchtitan_lite.checkpointing.safetensors_file import (
    FileRecord,
    TensorFileWriter,
    TensorSpecs,
    layout,
    specs_of,
    write_tensors,
)
from torchtitan_lite.checkpointing.save import Saver, Write
from torchtitan_lite.checkpointing.select import select_checkpoint
from torchtitan_lite.checkpointing.storage import Manifest, TrainState
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed import sharding
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.distributed.sharding import Tensors
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.models import Transformer
from torchtitan_lite.optim.optimizer import make_state


class Checkpointer:
    """Saves a run's checkpoints, and loads the one to resume from. All ranks make the same calls."""

    def __init__(
        self,
        folder: Path,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        config: CheckpointConfig,
        world: World,
    ) -> None:
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.world = world
        self.notes: list[str] = []  # from a load, for the log: damaged checkpoints
        self.aside: list[tuple[int, str]] = []  # steps to set aside, see select.py
        self.saver = Saver(folder, config, world)
        self.finished, self.wait = self.saver.finished, self.saver.wait
        self._buffers: Tensors = {}  # host copies of this rank's rows, reused by each save

    def save(self, state: TrainState) -> None:
        """Save model, optimizer and state. With `async_save`, copy them and write in the background.

        Never raises: `wait` returns the outcome.
        """
        way = {
            ("full", "dtensor"): self._full_by_dtensor,
            ("full", "dcp"): self._full_by_dcp,
            ("sharded", "dtensor"): self._sharded_by_dtensor,
            ("sharded", "dcp"): self._sharded_by_dcp,
        }[self.config.state_dict, self.config.api]
        background = self.config.async_save

        def prepare() -> tuple[Write, int]:
            parts = self._parts()
            return way(parts, background), _n_bytes(parts)

        self.saver.start(state, prepare, background=background)

    def require_space(self) -> None:
        """Raise CheckpointError on every rank if the disk has no room for one checkpoint."""
        on_rank0(self.world, lambda: storage.require_space(self.folder, _n_bytes(self._parts())))

    def load(self, identity: Mapping[str, Any]) -> TrainState | None:
        """Load the checkpoint that `config.resume` selects, and return its state; None if there is none.

        Only tensors are restored. Hyperparameters come from the config.

        Args:
            identity: has to equal the checkpoint's identity.

        Raises:
            CheckpointError: on every rank, before anything is overwritten: the checkpoint is damaged, or belongs to
                another model or other data.
        """
        selection = select_checkpoint(self.folder, self.config, self.world)
        self.notes, self.aside = selection.notes, selection.aside
        folder, manifest = selection.folder, selection.manifest
        if folder is None or manifest is None:
            return None
        state = TrainState(**on_rank0(self.world, lambda: asdict(self._read_state(folder, identity))))
        make_state(self.optimizer)
        with optimizer_as_saved(self.optimizer, state):
            on_rank0(self.world, lambda: self._require_same_tensors(folder, manifest))
            self._load_tensors(folder, manifest)
        self.saver.protect = {state.step}
        return state

    def _parts(self) -> sharding.Parts:
        """The tensors, by file of a full state dict."""
        model, optimizer = sharding.own_tensors(self.model), sharding.optimizer_tensors(self.model, self.optimizer)
        return {storage.MODEL: model, storage.OPTIMIZER: optimizer}

    def _read_state(self, folder: Path, identity: Mapping[str, Any]) -> TrainState:
        state = storage.read_state(folder, named_by_step=folder.parent == self.folder)
        storage.compare(folder, with_defaults(state.identity, identity), identity, "model, or other data")
        return state

    def _require_same_tensors(self, folder: Path, manifest: Manifest) -> None:
        if manifest.state_dict == "sharded":
            from torchtitan_lite.checkpointing import dcp_storage

            expected = _shapes(sharding.by_name(self._parts()))
            storage.compare(folder, dcp_storage.shapes(folder), expected, "model or optimizer")
            return
        for file, tensors in self._parts().items():
            storage.compare(folder, storage.read_shapes(folder / file), _shapes(tensors), file.split(".")[0])

    # --- saving -------------------------------------------------------------------------------------------------

    def _full_by_dtensor(self, parts: sharding.Parts, background: bool) -> Write:
        specs = {file: specs_of(tensors) for file, tensors in parts.items()}
        live = sharding.by_name(parts)
        gather: Callable[[str], Tensor] = lambda name: self._gather(live[name])  # noqa: E731
        if background:
            from torchtitan_lite.checkpointing.state_dict import HostGather, needed_copies

            copies = self._copied(needed_copies(live, self.world.rank))
            gather = HostGather(live, copies, self.saver.group)
        return functools.partial(self._gather_and_write, specs, gather)

    def _gather_and_write(
        self, files: Mapping[str, TensorSpecs], gather: Callable[[str], Tensor], folder: Path
    ) -> dict[str, FileRecord]:
        """Rank 0 writes one whole tensor at a time."""
        records: dict[str, FileRecord] = {}
        failure: Exception | None = None
        for file, specs in files.items():
            writer = None
            for name in layout(specs)[1]:
                try:
                    # a collective: all ranks take part, even after rank 0 has failed to write
                    whole = gather(f"{sharding.prefix(file)}{name}")
                    if self.world.rank == 0 and failure is None:
                        writer = writer or TensorFileWriter(folder / file, specs)
                        writer.write(whole)
                except Exception as error:  # any error, also no memory: the other ranks must not wait for this one
                    failure = failure or error
            try:
                if writer is not None and failure is None:
                    records[file] = writer.close()
                elif writer is not None:
                    writer.abandon()
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return records

    def _gather(self, value: Tensor) -> Tensor:
        """The whole tensor on rank 0's CPU, an empty one elsewhere."""
        dist.barrier(group=self.saver.group)  # untimed: rank 0's disk may be slow, and the gather below has a timeout
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.cpu().contiguous() if self.world.rank == 0 else torch.empty(0)

    def _full_by_dcp(self, parts: sharding.Parts, background: bool) -> Write:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: Any = get_model_state_dict(self.model, options=options)
        nested: Any = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        content: dict[str, Tensors] = {}
        if self.world.rank == 0:
            moments = sharding.flat(nested)
            content = {
                file: {name: (whole if file == storage.MODEL else moments)[name] for name in tensors}
                for file, tensors in parts.items()
            }
        if background:  # on one rank these are the live tensors
            content = {file: {n: t.clone() for n, t in tensors.items()} for file, tensors in content.items()}

        def write(folder: Path) -> dict[str, FileRecord]:
            return {
                file: write_tensors(folder / file, specs_of(tensors), tensors.__getitem__, ahead=0)
                for file, tensors in content.items()
            }

        return write

    def _sharded_by_dtensor(self, parts: sharding.Parts, background: bool) -> Write:
        return self._write_shards(sharding.by_name(parts), background)

    def _sharded_by_dcp(self, parts: sharding.Parts, background: bool) -> Write:
        model, nested = get_state_dict(self.model, self.optimizer)
        state: Any = {f"{sharding.prefix(storage.MODEL)}{name}": value for name, value in model.items()}
        state |= {f"{sharding.prefix(storage.OPTIMIZER)}{name}": value for name, value in sharding.flat(nested).items()}
        return self._write_shards({name: state[name] for name in sharding.by_name(parts)}, background)

    def _write_shards(self, state: Tensors, background: bool) -> Write:
        from torchtitan_lite.checkpointing import dcp_storage

        copies = self._copied(state) if background else None

        def write(folder: Path) -> dict[str, FileRecord]:
            writer = dcp_storage.ShardWriter(folder, copies)
            try:
                dcp.save(state, storage_writer=writer, process_group=self.saver.group)
            except CheckpointException as error:  # a BaseException, with every rank's traceback in its text
                whys = (f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
                raise CheckpointError("; ".join(whys)) from error
            return writer.records

        return write

    def _copied(self, state: Tensors) -> Tensors:
        """Copies of this rank's rows on the host; pinned on a GPU, for speed."""
        for name, value in state.items():
            local = value.to_local() if isinstance(value, DTensor) else value
            if name not in self._buffers or self._buffers[name].shape != local.shape:
                self._buffers[name] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name].copy_(local, non_blocking=True)
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return self._buffers

    # --- loading ------------------------------------------------------------------------------------------------

    def _load_tensors(self, folder: Path, manifest: Manifest) -> None:
        """Load either kind of state dict by the configured API."""
        if manifest.state_dict == "full" and self.config.api == "dtensor":
            for file, targets in self._parts().items():
                read = storage.open_tensors(folder / file).get_tensor if self.world.rank == 0 else None
                self.fill(targets, read)
        elif manifest.state_dict == "full":
            self._set_full(folder)
        elif self.config.api == "dtensor":
            self._load_shards(folder)
        else:
            self._set_sharded(folder)

    @torch.no_grad()
    def fill(self, targets: Mapping[str, Tensor], read: Callable[[str], Tensor] | None) -> None:
        """Rank 0 reads one whole tensor at a time, and broadcasts it in pieces. Each rank keeps its rows."""
        from torchtitan_lite.checkpointing.state_dict import PIECE, broadcast_rows

        buffer = torch.empty(PIECE, dtype=torch.uint8, device=self.world.device)
        for name, target in targets.items():
            whole = None
            if read and self.world.rank == 0:
                with progress.working(f"reading {name}"):
                    whole = read(name)
            dist.barrier(group=self.world.untimed)  # rank 0's disk may be slow, and the broadcast has a timeout
            broadcast_rows(whole, target, buffer)

    def _set_full(self, folder: Path) -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model: dict[str, Any] = {}
        nested: dict[str, Any] = {}
        if self.world.rank == 0:
            model = sharding.with_tied(self.model, load_file(folder / storage.MODEL))
            nested = sharding.nested_state(self.model, self.optimizer, load_file(folder / storage.OPTIMIZER))
        dist.barrier(group=self.world.untimed)  # the collectives below have a timeout
        ours = sharding.hyperparameters(self.optimizer)
        set_model_state_dict(self.model, model, options=options)
        set_optimizer_state_dict(self.model, self.optimizer, nested, options=options)
        sharding.restore(self.optimizer, ours)

    def _load_shards(self, folder: Path) -> Tensors:
        """Fill this rank's tensors from a sharded checkpoint, and return them by name."""
        from torchtitan_lite.checkpointing import dcp_storage

        state = sharding.by_name(self._parts())
        dcp_storage.load(state, folder, self.world.untimed)
        return state

    def _set_sharded(self, folder: Path) -> None:
        ours = sharding.hyperparameters(self.optimizer)
        state = self._load_shards(folder)
        model, optimizer = (
            {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
            for prefix in (sharding.prefix(storage.MODEL), sharding.prefix(storage.OPTIMIZER))
        )
        whole: Any = sharding.with_tied(self.model, model)
        nested: Any = sharding.nested_state(self.model, self.optimizer, optimizer)
        set_state_dict(self.model, self.optimizer, model_state_dict=whole, optim_state_dict=nested)
        sharding.restore(self.optimizer, ours)


def _n_bytes(parts: sharding.Parts) -> int:
    """The size of a checkpoint in bytes, without its JSON."""
    return sum(t.numel() * t.element_size() for tensors in parts.values() for t in tensors.values())


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


if __name__ == "__main__":
    from torchtitan_lite.tools import checkpoints

    sys.exit(checkpoints.main(sys.argv[1:]))
