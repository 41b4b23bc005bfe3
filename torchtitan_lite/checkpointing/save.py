"""Saves across all ranks, synchronously or in the background: snapshot, write, agree, commit.

Training waits for the snapshot: the state dicts and, for a save in the background, copies of the tensors. The rest may
run in a thread. Each rank writes its files into a hidden folder, which loading ignores. If all succeed, rank 0
commits the folder by renaming it (storage.py). If one rank fails, every rank returns the error as the outcome; this
module never stops the run because of a failed save.
"""

import contextlib
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite import progress
from torchtitan_lite.checkpointing import compatibility, full_state, storage
from torchtitan_lite.checkpointing.find import checkpoint_to_resume
from torchtitan_lite.checkpointing.safetensors_file import FileRecord, TensorSpecs, specs_of
from torchtitan_lite.checkpointing.shards import Layout, layout_of
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.tensor_names import Tensors, by_name, model_tensors, optimizer_tensors
from torchtitan_lite.config.paths import is_url
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed.exchange import on_all, on_rank0
from torchtitan_lite.distributed.process_group import Process, untimed_group
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.errors import text_of
from torchtitan_lite.models import Transformer
from torchtitan_lite.optim.optimizer import make_state

if TYPE_CHECKING:  # loaded only if the config asks for it
    from torchtitan_lite.checkpointing.remote import Remote

# A save of one way: up to `yield` the snapshot, while training waits; then it writes this rank's files into the folder
# that it receives, for a save in the background in a thread
Saving = Generator[None, Path, dict[str, FileRecord]]


@dataclass(frozen=True)
class Saved:
    """The outcome of a save; committed if `error` is empty."""

    step: int
    folder: Path
    bytes: int = 0
    seconds: float = 0.0
    blocked_s: float = 0.0  # how long training waited: for the snapshot, or for all of a synchronous save
    error: str = ""
    note: str = ""  # on rank 0: why older checkpoints were not deleted


class HostCopies:
    """One block of host memory with a view for each tensor, reused as long as names, dtypes and shapes stay.

    For a GPU the block is page-locked by cudaHostRegister: torch's allocator of pinned memory would round each tensor
    up to a power of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._views: Tensors = {}
        self._unlock: Callable[[], object] = lambda: None

    def reserve(self, specs: TensorSpecs) -> None:
        """Make room for these tensors."""
        if specs == specs_of(self._views):
            return
        self._unlock()
        self._views = {}  # frees the block before the next one is made
        order = sorted(specs, key=lambda name: -specs[name][0].itemsize)  # large elements first, for alignment
        sizes = [specs[name][0].itemsize * torch.Size(specs[name][1]).numel() for name in order]
        block = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        if self._device.type == "cuda" and len(block):
            block.fill_(0)  # torch's threads map the pages; registering alone would, in one thread
            runtime, address = torch.cuda.cudart(), block.data_ptr()
            if error := int(runtime.cudaHostRegister(address, len(block), 1)):  # 1: for all devices
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._device)  # takes the error, which CUDA returns to the next kernel, too
                raise torch.cuda.CudaError(error)
            self._unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)
        views = zip(order, block.split(sizes), strict=True)
        self._views = {name: data.view(specs[name][0]).view(specs[name][1]) for name, data in views}

    def fill(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Copy tensors, of a DTensor this rank's shard, into their views, and return these."""
        for name, tensor in tensors.items():
            self._views[name].copy_(own_part(tensor.detach())[0], non_blocking=True)
            progress.advance(self._views[name].nbytes)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return {name: self._views[name] for name in tensors}

    def of(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Copy exactly these tensors, and return the copies."""
        self.reserve(specs_of({name: own_part(tensor)[0] for name, tensor in tensors.items()}))
        return self.fill(tensors)


class Way(NamedTuple):
    """A kind of state dict saved and loaded by one API: functions of checkpoint.py."""

    save: Callable[["Checkpointer", bool], Saving]  # the bool: in the background
    load: Callable[["Checkpointer", Path], None]


class Checkpointer:
    """Saves a run's checkpoints, and loads the one to resume from. All ranks make the same calls."""

    def __init__(
        self,
        folder: Path,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        config: CheckpointConfig,
        process: Process,
        ways: Mapping[tuple[str, str], Way],
        best_of: Callable[[Path, Sequence[int]], int | None] = lambda *_: None,
        remote: "Remote | None" = None,
    ) -> None:
        """
        Args:
            ways: by kind of state dict and API, see checkpoint.py.
            best_of: returns the step of a run with the lowest validation loss among the given ones.
            remote: the run's bucket. Each machine then has its own disk.
        """
        self.folder, self.remote = folder, remote
        self.ways = ways
        self.best_of = best_of
        self.model = model
        self.mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        self.optimizer = optimizer
        self.config = config
        self.process = process
        own_disks = remote and config.state_dict == "sharded"  # each machine writes its part
        self._share = process.local_world_size / process.world_size if own_disks else 1.0  # of a save, on this disk
        self._leads = process.rank == 0 or bool(own_disks and remote and remote.leads)  # makes and commits the folder
        self.notes: list[str] = []  # set by a load, for the log: damaged checkpoints
        self.forked_from: Path | None = None  # set by a load: the checkpoint, if it belongs to a different run
        self.damaged: list[int] = []  # set by a load: newer damaged steps; saving such a step replaces it
        self.protect: set[int] = set()  # steps that retention must not delete
        # a save in the background needs its own group, separate from training and loads
        self.group = untimed_group() if config.async_save or process.untimed is None else process.untimed
        self.copies = HostCopies(process.device)  # reused by each save in the background
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._operation = ""  # for the watchdog

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
        targets = Tensors()
        if self.remote or is_url(self.config.resume):  # on all ranks: an optimizer's step may have collectives
            make_state(self.optimizer)
            targets = self.tensors()
            self.optimizer.state.clear()  # its values are wrong, and there may be nothing to load
        found = checkpoint_to_resume(self.folder, self.config, self.process, self.remote, targets)
        self.notes, folder = found.notes, found.folder
        if folder is None:
            return None
        self.forked_from = folder if found.forked else None
        if not found.forked:
            self.damaged = [int(each.name.removeprefix("step-")) for each in found.damaged]

        @progress.working("reading state.json")
        def read_and_compare() -> TrainState:
            state = storage.read_state(folder)
            compatibility.require_same_run(folder, state, values, fork=found.forked)
            return state

        state = TrainState(**on_rank0(read_and_compare, self.process.untimed))
        make_state(self.optimizer)  # a load fills existing tensors, and moments exist only after the first step
        with compatibility.optimizer_as_saved(self.optimizer, state):
            tensors = self.tensors()
            on_rank0(lambda: compatibility.require_same_tensors(folder, tensors), self.process.untimed)
            self.load_tensors(folder)
        self.protect = {state.step}
        return state

    def load_tensors(self, folder: Path) -> None:
        """Load a checkpoint of either kind by the configured API, whichever API saved it."""
        kind = on_rank0(lambda: storage.read_manifest(folder).state_dict, self.process.untimed)
        self.ways[kind, self.config.api].load(self, folder)

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
        targets = model_tensors(self.model)

        @progress.working("verifying the weights")
        def find_and_compare() -> list[Any]:  # JSON types, for on_rank0
            folder, notes = find()
            compatibility.require_same_weights(open_weights(folder), targets)
            return [str(folder), notes]

        found, notes = on_rank0(find_and_compare, self.process.untimed)
        folder, self.notes = Path(found), [*self.notes, *notes]
        if self.process.local_world_size < self.process.world_size:
            weights = open_weights(folder) if self.process.rank == 0 else {}
            full_state.scatter(targets, weights.__getitem__, self.mesh, self.process)
        else:
            on_all(lambda: full_state.copy_rows(open_weights(folder), targets), self.process.untimed)
        on_all(lambda: compatibility.require_finite(targets, folder), self.process.untimed)

    def tensors(self) -> Tensors:
        """Return the live tensors by their names in a sharded state dict."""
        return by_name(model_tensors(self.model), optimizer_tensors(self.model, self.optimizer))

    def save(self, state: TrainState) -> None:
        """Save model, optimizer and state; with `async_save`, write in the background.

        Never raises: `wait` returns the outcome.
        """
        assert self._thread is None, "wait for the previous save first"
        background, began = self.config.async_save, time.perf_counter()
        self._operation = f"saving step {state.step}"
        outcome = Saved(state.step, storage.step_folder(self.folder, state.step))
        saving = self.ways[self.config.state_dict, self.config.api].save(self, background)
        try:  # writing has collectives, so all ranks begin it or none
            with progress.doing(self._operation):
                on_all(lambda: next(saving), self.group)
        except Exception as error:  # e.g. one rank has no memory for the copies
            self._saved = replace(outcome, error=text_of(error))
            return
        layout = None if self.config.state_dict == "full" else asdict(self.layout())
        n_bytes, blocked_s = self._n_bytes(), time.perf_counter() - began

        def finish() -> None:
            try:
                with progress.doing(self._operation):
                    n_written = self._write_and_commit(state, saving, layout, n_bytes)
                saved = replace(outcome, bytes=n_written, note=self._delete_old(state.step))
                if self.remote and self._leads:
                    self.remote.upload(outcome.folder, n_written, partial(self._kept, step=state.step))
            except Exception as error:  # also from a collective, if a rank is lost
                saved = replace(outcome, error=text_of(error))
            seconds = time.perf_counter() - began
            self._saved = replace(saved, seconds=seconds, blocked_s=blocked_s if background else seconds)

        if background:
            self._thread = threading.Thread(target=finish, name="save", daemon=True)
            self._thread.start()
        else:
            finish()

    def layout(self) -> Layout:
        """Return which rank writes what. Computed in each save: the optimizer's tensors appear after the first step."""
        return layout_of(self.tensors(), self.mesh.shape)

    def _n_bytes(self) -> int:
        """Return the size of a checkpoint in bytes, without its JSON; before the first step, a lower bound of it."""
        n_bytes = sum(tensor.nbytes for tensor in self.tensors().values())
        return n_bytes if self.optimizer.state else 2 * n_bytes  # at least one moment for each weight

    def _write_and_commit(
        self, state: TrainState, saving: Saving, layout: Mapping[str, Any] | None, n_bytes: int
    ) -> int:
        """Write and commit a checkpoint, and return its size. Raises if the disk has less than `n_bytes` free."""

        @progress.working("making its folder")
        def make_folder() -> str:
            storage.remove_leftovers(self.folder)
            storage.require_space(self.folder, int(n_bytes * self._share))
            return str(storage.new_folder(self.folder, state.step, self.remote.claim if self.remote else ""))

        folder = self.folder / Path(self._on_leaders(make_folder)).name

        def write_files() -> Mapping[str, FileRecord]:
            try:
                saving.send(folder)
            except StopIteration as done:
                return done.value
            raise AssertionError("a save yields once")

        @progress.working("committing its folder")
        def commit() -> None:
            claim = self.remote.claim if self.remote else ""
            storage.commit(folder, state, self.config.state_dict, self.process.world_size, files, layout, claim)

        try:
            written = on_all(write_files, self.group)
            files = {name: FileRecord(**record) for records in written for name, record in records.items()}
            if self.remote:
                state = TrainState(**on_rank0(lambda: asdict(state), self.group))  # every machine writes the same
            self._on_leaders(commit)
        except Exception:
            if self._leads:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return sum(record.bytes for record in files.values())

    def _on_leaders(self, action: Callable[[], Any]) -> Any:
        """Run an action on rank 0; if each machine writes to its own disk, on one rank of each. Returns rank 0's.

        Collective, also its errors.
        """
        if self.remote is None:
            return on_rank0(action, self.group)
        return on_all(lambda: action() if self._leads else None, self.group)[0]

    def finished(self) -> bool:
        """Return whether `wait` would return an outcome at once. Ranks may differ."""
        return self._saved is not None and (self._thread is None or not self._thread.is_alive())

    def wait(self) -> Saved | None:
        """Wait for a running save, and return the last outcome, once; None if there was none."""
        if self._thread is not None:
            with progress.doing(self._operation):
                self._thread.join()
            self._thread = None
        saved, self._saved = self._saved, None
        return saved

    # --- space and retention ------------------------------------------------------------------------------------

    def require_space(self) -> None:
        """Raise SaveError on every rank if the disk has no room for a checkpoint."""
        check = progress.working("checking the free disk space")(storage.require_space)
        self._on_leaders(lambda: check(self.folder, int(self._n_bytes() * self._share)))

    def _delete_old(self, step: int) -> str:
        """Apply retention on rank 0, or each machine's disk. Returns the error, which does not fail the save."""
        if not self._leads or (self.remote and self.remote.uploading()):  # until a signal, saves wait for uploads
            return ""
        try:
            steps = storage.find_steps(self.folder)
            for old in sorted({*steps} - self._kept(steps, step)):
                shutil.rmtree(storage.move_to_trash(storage.step_folder(self.folder, old)), ignore_errors=True)
            self.damaged = [damaged for damaged in self.damaged if damaged > step]
        except Exception as caught:
            return text_of(caught)
        return ""

    def _kept(self, steps: list[int], step: int) -> set[int]:
        """Return the steps to keep after saving `step`. A damaged one stays until its own or a later step is saved."""
        c, later = self.config, {saved for saved in steps if saved > step}
        steps = [saved for saved in steps if saved not in {*later, *self.damaged} - {step}]
        best = self.best_of(self.folder.parent, steps) if c.keep_best else None
        also = {*self.protect, step} | ({best} if best is not None else set())
        return later | to_keep(steps, c.keep_latest, c.keep_every, also)


def to_keep(steps: Sequence[int], latest: int, every: int, also: Iterable[int]) -> set[int]:
    """Return the steps that retention keeps.

    Args:
        steps: of the checkpoints, ascending.
        latest: number of newest steps to keep; 0: all.
        every: keep multiples of this; 0: off.
        also: keep these steps too.
    """
    if latest == 0:
        return set(steps)
    return {*steps[-latest:], *also, *(step for step in steps if every and step % every == 0)}
