"""Save and load an FSDP2 model and its optimizer: two APIs, two kinds of state dict, the same files.

FSDP2's parameters and AdamW's moments are DTensors: each rank has some of the rows.

    state_dict   api       saving                                             loading
    full         dtensor   gathered and written by rank 0                     read by rank 0, which sends rows
    full         dcp       get_state_dict, gathered by torch                  set_model_state_dict, set_optimizer_...
    sharded      dtensor   each rank writes its rows                          each rank reads its rows
    sharded      dcp       get_state_dict, then dcp.save                      dcp.load, then set_state_dict

Full: rank 0 alone writes and reads whole tensors. No shared file system is needed.
Sharded: every rank writes and reads its own rows. Nothing is gathered.
Each of the four ways loads the files of any other, on any world size. The dtensor way shows each step and is the place
to customise; the dcp way leaves the work to torch. Below, each way's save stands next to its load.

A save runs up to its `yield` while training waits: the snapshot. Then it receives a folder and writes its files, with
`checkpoint.async_save` in a thread.

checkpointing/save.py calls these functions: snapshot, write, agree, commit. shards.py computes which rank has which
rows, storage.py defines when a checkpoint is complete, find.py selects the one to load. Command line: `python
checkpoint.py verify | inspect | export | import`.
"""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite import progress
from torchtitan_lite.checkpointing import full_state, tensor_names  # before torch

# isort: split
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from torchtitan_lite.checkpointing.safetensors_file import FileRecord, TensorWriter, specs_of, write_tensors
from torchtitan_lite.checkpointing.save import Checkpointer, Saving, Way
from torchtitan_lite.checkpointing.shards import Layout, Reads, read_places, read_tensors, write_rows
from torchtitan_lite.checkpointing.storage import MODEL, OPTIMIZER, reading
from torchtitan_lite.checkpointing.tensor_names import Tensors
from torchtitan_lite.checkpointing.torch_storage import PartsReader, SyncingWriter, failures
from torchtitan_lite.distributed.exchange import on_all, on_rank0
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.optim.groups import kept_hyperparameters

# --- full state dict, DTensor API -----------------------------------------------------------------------------------


def save_full_by_dtensor(c: Checkpointer, background: bool) -> Saving:
    """Gather whole tensors, a large one at a time; rank 0 writes them. A background save first gathers all.

    (A gather is a collective in training's group, and all ranks must start collectives in the same order. So a thread
    can't begin one during training.)
    """
    tensors, whole = c.tensors(), Tensors()
    if background:
        on_rank0(lambda: c.copies.reserve(specs_of(tensors)), c.group)
        full_state.gather(tensors, c.mesh, lambda group: whole.update(c.copies.fill(group)), c.group)
    folder = yield
    if background:
        return write_whole(folder, whole)
    files = {}
    for file, part in tensor_names.by_file(tensors).items():
        with TensorWriter(folder / file, specs_of(part)) as writer:
            full_state.gather({name: part[name] for name in writer.names}, c.mesh, writer.add, c.group)
            files[file] = FileRecord(**on_rank0(writer.close, c.group))
    return files


def write_whole(folder: Path, tensors: Tensors) -> dict[str, FileRecord]:
    """Write whole tensors from rank 0's memory. The other ranks have none."""
    parts = tensor_names.by_file(tensors) if tensors else {}
    return {file: write_tensors(folder / file, specs_of(part), part.__getitem__) for file, part in parts.items()}


def load_full_by_dtensor(c: Checkpointer, folder: Path) -> None:
    """Read whole tensors on rank 0, a large one at a time, and send each rank its rows.

    If every rank read the file, every machine would need it, and a shared disk would be read once per rank.
    (distribute_tensor would need the whole tensor on every rank, also in GPU memory.)
    """
    saved = functools.cache(lambda: read_tensors(folder))  # only where scatter sends an error to all ranks
    full_state.scatter(c.tensors(), lambda name: saved()[name], c.mesh, c.process)


# --- full state dict, DCP API ---------------------------------------------------------------------------------------


def save_full_by_dcp(c: Checkpointer, background: bool) -> Saving:
    """Let torch gather everything into rank 0's memory, and write it there.

    If one rank fails within torch's gather, the others wait in torch's collectives until the watchdog ends the run
    (outside of a run, until they time out).
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(c.model, c.optimizer, options=options)
    # the other ranks get empty dicts
    whole = by_torch(c, model, optimizer) if c.process.rank == 0 else {}
    # on one rank, cpu_offload copies nothing from CPU to CPU: these are the live tensors
    tensors = c.copies.of(whole) if background else whole
    folder = yield
    return write_whole(folder, tensors)


def load_full_by_dcp(c: Checkpointer, folder: Path) -> None:
    """Read everything into rank 0's memory. Torch broadcasts it, and each rank keeps its rows."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}

    @progress.working("reading the checkpoint")
    def read() -> None:
        # set_model_state_dict is strict: it also needs the second names of tied parameters
        model.update(tensor_names.with_tied(c.model, dict(read_tensors(folder, tensor_names.prefix(MODEL)))))
        saved = dict(read_tensors(folder, tensor_names.prefix(OPTIMIZER)))
        optimizer.update(tensor_names.nested_state(c.model, c.optimizer, saved))

    on_rank0(read, c.process.untimed)  # outside of a run the collectives below have a timeout
    # Torch also loads `param_groups`: it turns tuples such as betas into lists, and a saved learning rate would
    # overwrite the config's. So we restore ours.
    with kept_hyperparameters(c.optimizer):
        set_model_state_dict(c.model, model, options=options)
        set_optimizer_state_dict(c.model, c.optimizer, optimizer, options=options)


# --- sharded state dict, DTensor API --------------------------------------------------------------------------------


def save_sharded_by_dtensor(c: Checkpointer, background: bool) -> Saving:
    """Write this rank's rows. With HSDP, one replica writes the rows of a tensor. The ranks exchange nothing."""
    tensors, layout, rank = c.tensors(), c.layout(), c.process.rank
    rows = {name: own_part(tensors[name])[0] for name in layout.of_rank(rank)}
    if background:
        rows = c.copies.of(rows)
    folder = yield
    return write_rows(folder, layout, rank, rows.__getitem__)


def load_sharded_by_dtensor(c: Checkpointer, folder: Path) -> None:
    """Read this rank's rows into its tensors, from only the files that have them."""
    read_rows(c, folder, c.tensors())


# --- sharded state dict, DCP API ------------------------------------------------------------------------------------


def save_sharded_by_dcp(c: Checkpointer, background: bool) -> Saving:
    """Save the tensors that get_state_dict returns. DCP gets only what this rank writes, and plans without the others.

    (By its own choice of who writes what, DCP would gather pickled plans on rank 0: minutes on 1,024 ranks.)
    """
    tensors, layout, rank = by_torch(c, *get_state_dict(c.model, c.optimizer)), c.layout(), c.process.rank
    own = {name: tensors[name] for name in layout.of_rank(rank)}
    if background:
        own = c.copies.of(own)
    folder = yield
    writer = SyncingWriter(folder, lambda rows: write_rows(folder, layout, rank, rows))
    with failures(folder):
        dcp.save(own, storage_writer=writer, no_dist=True)
    return writer.records


def load_sharded_by_dcp(c: Checkpointer, folder: Path) -> None:
    """Load into the tensors of get_state_dict. They share memory with model and optimizer, so dcp.load fills both.

    set_state_dict is needed for modules and optimizers whose state dicts are copies. It also loads `param_groups`.
    """
    with kept_hyperparameters(c.optimizer):
        model, optimizer = get_state_dict(c.model, c.optimizer)
        read_rows(c, folder, by_torch(c, model, optimizer), by_dcp=True)
        set_state_dict(c.model, c.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def read_rows(c: Checkpointer, folder: Path, tensors: Tensors, *, by_dcp: bool = False) -> None:
    """Fill this rank's rows of tensors, from only the files that have them."""

    @progress.working(f"reading its rows of {folder.name}")
    def read() -> None:
        reads = Reads(folder, read_places(folder), tensors)
        if by_dcp and isinstance(reads.places, Layout):  # DCP can't read the names of format 6
            own = {name: tensors[name] for parts in reads.files.values() for name, _ in parts}
            with failures(folder), reading(folder):
                dcp.load(own, storage_reader=PartsReader(reads), no_dist=True)
        else:
            reads.read()

    on_all(read, c.process.untimed)


def by_torch(c: Checkpointer, model: Mapping[str, Any], optimizer: Any) -> Tensors:
    """Return get_state_dict's tensors by our names, which have only a tied parameter's first name."""
    tensors = tensor_names.by_name(model, tensor_names.flat(optimizer))
    return {name: tensors[name] for name in c.tensors()}


WAYS: Mapping[tuple[str, str], Way] = {  # by kind of state dict and API
    ("full", "dtensor"): Way(save_full_by_dtensor, load_full_by_dtensor),
    ("full", "dcp"): Way(save_full_by_dcp, load_full_by_dcp),
    ("sharded", "dtensor"): Way(save_sharded_by_dtensor, load_sharded_by_dtensor),
    ("sharded", "dcp"): Way(save_sharded_by_dcp, load_sharded_by_dcp),
}


if __name__ == "__main__":
    from torchtitan_lite.tools import checkpoints

    sys.exit(checkpoints.main(sys.argv[1:]))
