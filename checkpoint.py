"""Save and load an FSDP2 model and its optimizer: two APIs, two kinds of state dict, the same files.

FSDP2's parameters and AdamW's moments are DTensors: each rank holds some of the rows.

    state_dict   api       saving                                             loading
    full         dtensor   full_tensor(), tensor by tensor                    broadcast(), tensor by tensor
    full         dcp       get_state_dict, gathered by torch                  set_model_state_dict, set_optimizer_...
    sharded      dtensor   dcp.save of the dict of DTensors                   dcp.load into the dict of DTensors
    sharded      dcp       get_state_dict, then dcp.save                      dcp.load, then set_state_dict

Full: rank 0 alone writes and reads whole tensors. No shared file system is needed.
Sharded: every rank writes and reads its own rows. Nothing is gathered.
Each of the four ways loads what any other has written, on any world size. The dtensor way shows each step and is the
place to customise; the dcp way leaves the work to torch. Below, each way has its save next to its load.

checkpointing/storage.py defines when a checkpoint is complete, select.py which one is loaded, save.py how a save runs
in the background. Command line: `python checkpoint.py verify | inspect | convert | export | import`.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
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
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpointing import compatibility, full_state, progress, storage, tensor_names
from torchtitan_lite.checkpointing.dcp_storage import ShardReader, ShardWriter
from torchtitan_lite.checkpointing.safetensors_file import FileRecord, specs_of, write_tensors
from torchtitan_lite.checkpointing.save import BaseCheckpointer, Write
from torchtitan_lite.checkpointing.select import select_checkpoint
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.storage import MODEL, OPTIMIZER, Manifest
from torchtitan_lite.checkpointing.tensor_names import Parts, Tensors
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.optim.optimizer import kept_hyperparameters, make_state


class Checkpointer(BaseCheckpointer):
    """Saves a run's checkpoints, and loads the one to resume from. All ranks make the same calls."""

    def save(self, state: TrainState) -> None:
        """Save model, optimizer and state. With `async_save`, copy them and write in the background.

        Never raises: `wait` returns the outcome.
        """
        self.start_save(state, getattr(self, f"save_{self.config.state_dict}_by_{self.config.api}"))

    def load(self, values: Mapping[str, Any]) -> TrainState | None:
        """Load the checkpoint that `config.resume` selects, and return its state; None if there is none.

        Only tensors are restored. Hyperparameters come from the config.

        Args:
            values: of this run's TrainState, to be compared with the checkpoint's.

        Raises:
            CheckpointError: on every rank, before anything is overwritten: the checkpoint is damaged, or the run can't
                continue with these values.
        """
        selection = select_checkpoint(self.folder, self.config, self.world)
        self.notes, self.damaged = selection.notes, selection.damaged
        if selection.checkpoint is None:
            return None
        folder, manifest = selection.checkpoint
        self.forked_from = None if folder.parent == self.folder else folder
        state = compatibility.read_state(folder, values, self.world, named_by_step=self.forked_from is None)
        make_state(self.optimizer)  # a load fills existing tensors, and moments exist only after the first step
        with compatibility.optimizer_as_saved(self.optimizer, state):
            compatibility.require_same_tensors(folder, manifest, self.parts(), self.world)
            self.load_tensors(folder, manifest)
        self.protect = {state.step}
        return state

    def load_tensors(self, folder: Path, manifest: Manifest) -> None:
        """Load a checkpoint of either kind by the configured API, whichever API has saved it."""
        getattr(self, f"load_{manifest.state_dict}_by_{self.config.api}")(folder)

    # --- full state dict, DTensor API ---------------------------------------------------------------------------

    def save_full_by_dtensor(self, background: bool) -> Write:
        """Rank 0 gathers one whole tensor at a time, and writes it. Returns the function that does so."""
        parts = self.parts()
        specs = {file: specs_of(tensors) for file, tensors in parts.items()}
        tensors = tensor_names.by_name(parts)
        gather: Callable[[str], Tensor] = functools.partial(self.gather, tensors)
        if background:
            # The next step changes the tensors, so each rank copies its rows now. And full_tensor() would use the
            # process group of training, where every rank has to start the same collectives in the same order.
            copies = self.host_copies(full_state.needed_copies(tensors, self.world.rank))
            gather = full_state.HostGather(tensors, copies, self.group)
        return lambda folder: full_state.write_gathered(folder, specs, gather, writes=self.world.rank == 0)

    def gather(self, tensors: Tensors, name: str) -> Tensor:
        """The whole tensor on rank 0's CPU, an empty one elsewhere."""
        # full_tensor() is a collective with a timeout. Rank 0 comes to it after writing the previous tensor, which
        # takes as long as its disk does. So the others wait for it here, in a group without a timeout.
        dist.barrier(group=self.group)
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.cpu().contiguous() if self.world.rank == 0 else torch.empty(0)

    def load_full_by_dtensor(self, folder: Path) -> None:
        """Rank 0 reads one whole tensor at a time, and broadcasts it. Each rank keeps its rows.

        If every rank read the file, every machine would need it, and a shared disk would be read once per rank.
        (distribute_tensor needs the whole tensor on every rank, also in the memory of a GPU.)
        """
        for file, targets in self.parts().items():
            read = storage.open_tensors(folder / file).get_tensor if self.world.rank == 0 else None
            self.broadcast(targets, read)

    def broadcast(self, targets: Mapping[str, Tensor], read: Callable[[str], Tensor] | None) -> None:
        """Fill tensors from the whole ones that `read` returns on rank 0."""
        buffer = torch.empty(full_state.PIECE, dtype=torch.uint8, device=self.world.device)
        for name, target in targets.items():
            whole = None
            if read and self.world.rank == 0:
                with progress.working(f"reading {name}"):
                    whole = read(name).contiguous()  # another family's weights may be transposed views
            dist.barrier(group=self.world.untimed)  # as in `gather`: the broadcasts have a timeout
            full_state.broadcast_rows(whole, target, buffer)

    # --- full state dict, DCP API -------------------------------------------------------------------------------

    def save_full_by_dcp(self, background: bool) -> Write:
        """Torch gathers everything into rank 0's memory. Returns the function that writes it.

        If one rank fails within torch's gather, the others wait in its collectives until they time out.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        content = self.as_parts(model, optimizer) if self.world.rank == 0 else {}  # the other ranks get empty dicts
        if background:  # on one rank, cpu_offload copies nothing from CPU to CPU: these are the live tensors
            content = {file: {n: t.clone() for n, t in tensors.items()} for file, tensors in content.items()}

        def write(folder: Path) -> dict[str, FileRecord]:
            return {
                file: write_tensors(folder / file, specs_of(tensors), tensors.__getitem__, ahead=0)
                for file, tensors in content.items()
            }

        return write

    def load_full_by_dcp(self, folder: Path) -> None:
        """Rank 0 reads everything into its memory. Torch broadcasts it, and each rank keeps its rows."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}
        if self.world.rank == 0:
            # set_model_state_dict is strict: it also wants the second names of tied parameters
            model = tensor_names.with_tied(self.model, load_file(folder / MODEL))
            optimizer = tensor_names.nested_state(self.model, self.optimizer, load_file(folder / OPTIMIZER))
        dist.barrier(group=self.world.untimed)  # the collectives in these functions have a timeout
        # Torch also loads `param_groups`: it makes lists of tuples such as betas, and a state dict with a learning rate
        # would overwrite that of the config. So we put ours back.
        with kept_hyperparameters(self.optimizer):
            set_model_state_dict(self.model, model, options=options)
            set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=options)

    # --- sharded state dict, DTensor API ------------------------------------------------------------------------

    def save_sharded_by_dtensor(self, background: bool) -> Write:
        """DCP plans from the DTensors which rank writes which rows: each row once, even if HSDP has copies of it."""
        return self.write_shards(tensor_names.by_name(self.parts()), background)

    def write_shards(self, tensors: Tensors, background: bool) -> Write:
        """Returns the function that writes this rank's rows."""
        copies = self.host_copies(tensors) if background else None

        def write(folder: Path) -> dict[str, FileRecord]:
            # DCP's own FileSystemWriter has no hashes, and its plan is a pickle, which can run code when it is loaded
            writer = ShardWriter(folder, copies)
            with failures_of_ranks():
                dcp.save(tensors, storage_writer=writer, process_group=self.group)
            return writer.records

        return write

    def load_sharded_by_dtensor(self, folder: Path) -> None:
        """Each rank reads its rows into its tensors, from whichever files have them."""
        tensors = tensor_names.by_name(self.parts())
        with failures_of_ranks():
            dcp.load(tensors, storage_reader=ShardReader(folder), process_group=self.world.untimed)

    # --- sharded state dict, DCP API ----------------------------------------------------------------------------

    def save_sharded_by_dcp(self, background: bool) -> Write:
        """The same, with the tensors that get_state_dict returns."""
        parts = self.as_parts(*get_state_dict(self.model, self.optimizer))
        return self.write_shards(tensor_names.by_name(parts), background)

    def load_sharded_by_dcp(self, folder: Path) -> None:
        """The dicts of get_state_dict share memory with model and optimizer, so dcp.load has already filled these.

        set_state_dict is for modules and optimizers whose state dicts are copies. It also loads `param_groups`.
        """
        with kept_hyperparameters(self.optimizer), failures_of_ranks():
            model, optimizer = get_state_dict(self.model, self.optimizer)
            tensors = tensor_names.by_name(self.as_parts(model, optimizer))
            dcp.load(tensors, storage_reader=ShardReader(folder), process_group=self.world.untimed)
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def as_parts(self, model: Mapping[str, Any], optimizer: Any) -> Parts:
        """The tensors of get_state_dict by file and by our names: there a tied parameter has only its first name."""
        by_file = {MODEL: model, OPTIMIZER: tensor_names.flat(optimizer)}
        return {file: {name: by_file[file][name] for name in tensors} for file, tensors in self.parts().items()}

    # --- the weights of another model ---------------------------------------------------------------------------

    def load_weights(self, open_weights: Callable[[bool], Mapping[str, Tensor]]) -> None:
        """Load only a model's weights, as `model.init_from` asks for before the first step.

        On one machine each rank reads its rows; on several, rank 0 sends them.

        Args:
            open_weights: returns whole tensors by our names, read lazily. Its argument: verify the files (on rank 0).

        Raises:
            CheckpointError: on every rank, before anything is overwritten: the weights are of another model.
        """
        targets = tensor_names.own_tensors(self.model)
        weights = compatibility.open_same_weights(open_weights, targets, self.world)
        if self.world.local_world_size < self.world.world_size:
            self.broadcast(targets, weights.__getitem__)
        else:
            full_state.copy_rows(weights or open_weights(False), targets)


@contextlib.contextmanager
def failures_of_ranks() -> Iterator[None]:
    """DCP raises a BaseException, which `except Exception` does not catch: make it a CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        reasons = (f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise CheckpointError("; ".join(reasons)) from error


if __name__ == "__main__":
    from torchtitan_lite.tools import checkpoints

    sys.exit(checkpoints.main(sys.argv[1:]))
