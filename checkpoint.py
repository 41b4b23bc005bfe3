"""Save and load an FSDP2 model and its optimizer: two APIs, two kinds of state dict, the same files.

FSDP2's parameters and AdamW's moments are DTensors: each rank has some of the rows.

    state_dict   api       saving                                             loading
    full         dtensor   gathered and written by rank 0                     read by rank 0, which sends rows
    full         dcp       get_state_dict, gathered by torch                  set_model_state_dict, set_optimizer_...
    sharded      dtensor   dcp.save of the dict of DTensors                   dcp.load into the dict of DTensors
    sharded      dcp       get_state_dict, then dcp.save                      dcp.load, then set_state_dict

Full: rank 0 alone writes and reads whole tensors. No shared file system is needed.
Sharded: every rank writes and reads its own rows. Nothing is gathered.
Each of the four ways loads the files of any other, on any world size. The dtensor way shows each step and is the place
to customise; the dcp way leaves the work to torch. Below, each way's save stands next to its load.

checkpointing/storage.py defines when a checkpoint is complete, find.py selects the one to load, save.py has the steps
of a save. Command line: `python checkpoint.py verify | inspect | export | import`.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpointing import compatibility, full_state, progress, storage, tensor_names  # before torch

# isort: split
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

from torchtitan_lite.checkpointing.dcp_storage import ShardReader, ShardWriter
from torchtitan_lite.checkpointing.find import checkpoint_to_resume
from torchtitan_lite.checkpointing.safetensors_file import FileRecord, TensorWriter, specs_of, write_tensors
from torchtitan_lite.checkpointing.save import BaseCheckpointer, Write
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.storage import MODEL, OPTIMIZER
from torchtitan_lite.checkpointing.tensor_names import Parts, Tensors
from torchtitan_lite.distributed.ranks import on_all, on_rank0
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.optim.optimizer import kept_hyperparameters, make_state


class Checkpointer(BaseCheckpointer):
    """Saves a run's checkpoints, and loads the one to resume from. All ranks make the same calls."""

    def snapshot(self, background: bool) -> Write:
        """Gather or copy the tensors in the configured way. Returns the function that writes them into a folder."""
        save, _ = WAYS[self.config.state_dict, self.config.api]
        return save(self, background)

    def load(self, values: Mapping[str, Any]) -> TrainState | None:
        """Load the checkpoint that `config.resume` selects, and return its state; None if there is none.

        Only tensors are restored: parameters, buffers, and the optimizer's state with its step counts. Hyperparameters
        come from the config.

        Args:
            values: this run's TrainState.values, to compare with the checkpoint's.

        Raises:
            CheckpointError: on every rank, before anything is overwritten: the checkpoint is damaged, or the run can't
                continue with these values.
        """
        found = checkpoint_to_resume(self.folder, self.config, self.process)
        self.notes = found.notes
        if found.folder is None:
            return None
        self.forked_from = found.folder if found.forked else None
        if not found.forked:
            self.damaged = [int(folder.name.removeprefix("step-")) for folder in found.damaged]
        state = compatibility.read_state(found.folder, values, self.process, self.ruined_from, fork=found.forked)
        make_state(self.optimizer)  # a load fills existing tensors, and moments exist only after the first step
        with compatibility.optimizer_as_saved(self.optimizer, state):
            compatibility.require_same_tensors(found.folder, self.parts(), self.process)
            self.load_tensors(found.folder)
        self.protect = {state.step}
        return state

    def load_tensors(self, folder: Path) -> None:
        """Load a checkpoint of either kind by the configured API, whichever API saved it."""
        kind = on_rank0(lambda: storage.read_manifest(folder).state_dict, self.process.untimed)
        _, load = WAYS[kind, self.config.api]
        load(self, folder)

    # --- full state dict, DTensor API ---------------------------------------------------------------------------

    def save_full_by_dtensor(self, background: bool) -> Write:
        """Gather whole tensors, a large one at a time; rank 0 writes them. A background save first gathers all.

        (A gather is a collective in training's group, and all ranks must start collectives in the same order. So a
        thread can't begin one during training.)
        """
        parts = self.parts()
        if not background:
            return lambda folder: {file: self.write_gathered(folder / file, part) for file, part in parts.items()}
        whole: Tensors = {}
        self.gather(tensor_names.by_name(parts), lambda tensors: whole.update(self.host_copies(tensors)))
        return self.write_whole(whole)

    def write_gathered(self, path: Path, tensors: Tensors) -> FileRecord:
        """Write a file of whole tensors on rank 0. Collective."""
        with TensorWriter(path, specs_of(tensors)) as writer:
            self.gather({name: tensors[name] for name in writer.names}, writer.add)
            return FileRecord(**on_rank0(lambda: asdict(writer.close()), self.group))

    def gather(self, tensors: Tensors, take: Callable[[Tensors], None]) -> None:
        """Gather whole tensors, small ones together, and pass them to `take` on rank 0. Collective, also its errors."""
        for group in tensor_names.in_groups(tensors):
            full_state.gather(group, self.mesh, take, self.group)

    def write_whole(self, tensors: Tensors) -> Write:
        """Return the function that writes whole tensors from rank 0's memory."""

        def write(folder: Path) -> dict[str, FileRecord]:
            parts = tensor_names.by_file(tensors, [MODEL, OPTIMIZER]) if self.process.rank == 0 else {}
            return {
                file: write_tensors(folder / file, specs_of(part), part.__getitem__, ahead=0)
                for file, part in parts.items()
            }

        return write

    def load_full_by_dtensor(self, folder: Path) -> None:
        """Read whole tensors on rank 0, a large one at a time, and send each rank its rows.

        If every rank read the file, every machine would need it, and a shared disk would be read once per rank.
        (distribute_tensor would need the whole tensor on every rank, also in GPU memory.)
        """
        opened = functools.cache(storage.open_tensors)
        for file, targets in self.parts().items():
            self.scatter(targets, lambda name, file=file: opened(folder / file).get_tensor(name))  # type: ignore[misc]

    def scatter(self, targets: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
        """Fill tensors from the whole ones that `read` returns on rank 0. Collective, also its errors."""
        for group in tensor_names.in_groups(targets):
            full_state.scatter(read, group, self.mesh, self.process)

    # --- full state dict, DCP API -------------------------------------------------------------------------------

    def save_full_by_dcp(self, background: bool) -> Write:
        """Let torch gather everything into rank 0's memory. Returns the function that writes it.

        If one rank fails within torch's gather, the others wait in torch's collectives until the watchdog ends the run
        (outside of a run, until they time out).
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        # the other ranks get empty dicts
        whole = tensor_names.by_name(self.as_parts(model, optimizer)) if self.process.rank == 0 else {}
        # on one rank, cpu_offload copies nothing from CPU to CPU: these are the live tensors
        return self.write_whole(self.host_copies(whole) if background else whole)

    def load_full_by_dcp(self, folder: Path) -> None:
        """Read everything into rank 0's memory. Torch broadcasts it, and each rank keeps its rows."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model: dict[str, Any] = {}
        optimizer: dict[str, Any] = {}

        @progress.working("reading the checkpoint")
        def read() -> None:
            # set_model_state_dict is strict: it also needs the second names of tied parameters
            model.update(tensor_names.with_tied(self.model, load_file(folder / MODEL)))
            optimizer.update(tensor_names.nested_state(self.model, self.optimizer, load_file(folder / OPTIMIZER)))

        on_rank0(read, self.process.untimed)  # outside of a run the collectives below have a timeout
        # Torch also loads `param_groups`: it turns tuples such as betas into lists, and a saved learning rate would
        # overwrite the config's. So we restore ours.
        with kept_hyperparameters(self.optimizer):
            set_model_state_dict(self.model, model, options=options)
            set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=options)

    # --- sharded state dict, DTensor API ------------------------------------------------------------------------

    def save_sharded_by_dtensor(self, background: bool) -> Write:
        """Let DCP plan, from the DTensors, which rank writes which rows: each row once, even with HSDP replicas."""
        return self.write_shards(tensor_names.by_name(self.parts()), background)

    def write_shards(self, tensors: Tensors, background: bool) -> Write:
        """Return the function that writes this rank's rows."""
        copies = self.host_copies(tensors) if background else None

        def write(folder: Path) -> dict[str, FileRecord]:
            # DCP's FileSystemWriter has no hashes, and its plan is a pickle, which can run code when loaded
            writer = ShardWriter(folder, copies)
            with failures_of_ranks():
                dcp.save(tensors, storage_writer=writer, process_group=self.group)
            return writer.records

        return write

    def load_sharded_by_dtensor(self, folder: Path) -> None:
        """Read each rank's rows into its tensors, from whichever files have them."""
        tensors = tensor_names.by_name(self.parts())
        with failures_of_ranks():
            dcp.load(tensors, storage_reader=ShardReader(folder), process_group=self.process.untimed)

    # --- sharded state dict, DCP API ----------------------------------------------------------------------------

    def save_sharded_by_dcp(self, background: bool) -> Write:
        """Save the tensors that get_state_dict returns, as save_sharded_by_dtensor does."""
        parts = self.as_parts(*get_state_dict(self.model, self.optimizer))
        return self.write_shards(tensor_names.by_name(parts), background)

    def load_sharded_by_dcp(self, folder: Path) -> None:
        """Load into the tensors of get_state_dict. They share memory with model and optimizer, so dcp.load fills both.

        set_state_dict is needed for modules and optimizers whose state dicts are copies. It also loads `param_groups`.
        """
        with kept_hyperparameters(self.optimizer), failures_of_ranks():
            model, optimizer = get_state_dict(self.model, self.optimizer)
            tensors = tensor_names.by_name(self.as_parts(model, optimizer))
            dcp.load(tensors, storage_reader=ShardReader(folder), process_group=self.process.untimed)
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def as_parts(self, model: Mapping[str, Any], optimizer: Any) -> Parts:
        """Return get_state_dict's tensors by file and by our names, which have only a tied parameter's first name."""
        by_file = {MODEL: model, OPTIMIZER: tensor_names.flat(optimizer)}
        return {file: {name: by_file[file][name] for name in tensors} for file, tensors in self.parts().items()}

    # --- imported weights ---------------------------------------------------------------------------------------

    def load_weights(
        self, find: Callable[[], tuple[Path, list[str]]], open_weights: Callable[[Path], Mapping[str, Tensor]]
    ) -> None:
        """Load only a model's weights, for `model.init_from` before the first step.

        On one machine each rank reads its rows; on several, rank 0 sends them.

        Args:
            find: returns the verified folder with the weights, and notes for the log. Called on rank 0.
            open_weights: returns a folder's whole tensors by our names, read lazily.

        Raises:
            CheckpointError: on every rank: the weights belong to a different model (nothing is overwritten), or are
                not finite.
        """
        targets = tensor_names.own_tensors(self.model)
        folder, notes = compatibility.find_same_weights(find, open_weights, targets, self.process)
        self.notes += notes
        if self.process.local_world_size < self.process.world_size:
            weights = open_weights(folder) if self.process.rank == 0 else {}
            self.scatter(targets, weights.__getitem__)
        else:
            on_all(lambda: full_state.copy_rows(open_weights(folder), targets), self.process.untimed)
        on_all(lambda: compatibility.require_finite(targets, folder), self.process.untimed)


Save = Callable[[Checkpointer, bool], Write]  # the bool: save in the background
Load = Callable[[Checkpointer, Path], None]
WAYS: Mapping[tuple[str, str], tuple[Save, Load]] = {  # by kind of state dict and API
    ("full", "dtensor"): (Checkpointer.save_full_by_dtensor, Checkpointer.load_full_by_dtensor),
    ("full", "dcp"): (Checkpointer.save_full_by_dcp, Checkpointer.load_full_by_dcp),
    ("sharded", "dtensor"): (Checkpointer.save_sharded_by_dtensor, Checkpointer.load_sharded_by_dtensor),
    ("sharded", "dcp"): (Checkpointer.save_sharded_by_dcp, Checkpointer.load_sharded_by_dcp),
}


@contextlib.contextmanager
def failures_of_ranks() -> Iterator[None]:
    """Turn DCP's error into a CheckpointError: it is a BaseException, which `except Exception` does not catch."""
    try:
        yield
    except CheckpointException as error:
        reasons = (f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise CheckpointError("; ".join(reasons)) from error


if __name__ == "__main__":
    from torchtitan_lite.tools import checkpoints

    sys.exit(checkpoints.main(sys.argv[1:]))
