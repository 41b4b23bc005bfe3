"""Saves across all ranks, synchronously or in the background: snapshot, write, agree, commit.

Training waits for the snapshot: the state dicts and, for a save in the background, copies of the tensors. The rest may
run in a thread. Each rank writes its files into a hidden folder, which loading ignores. If all succeed, rank 0
commits the folder by renaming it (storage.py). If one rank fails, every rank returns the error as the outcome; this
module never stops the run because of a failed save.
"""

import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpointing import progress, storage
from torchtitan_lite.checkpointing.safetensors_file import FileRecord
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.tensor_names import Parts, Tensors, optimizer_tensors, own_tensors
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed.process_group import Process, untimed_group
from torchtitan_lite.distributed.ranks import on_all, on_rank0
from torchtitan_lite.errors import text_of
from torchtitan_lite.models import Transformer

Write = Callable[[Path], dict[str, FileRecord]]  # writes this rank's files into an existing folder


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


class BaseCheckpointer(ABC):
    """The base class of checkpoint.py's Checkpointer, with what all APIs and kinds of state dict share."""

    def __init__(
        self,
        folder: Path,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        config: CheckpointConfig,
        process: Process,
        best_of: Callable[[Path, Sequence[int]], int | None] = lambda *_: None,
        ruined_from: Callable[[Path], float] = lambda _: float("inf"),
    ) -> None:
        """
        Args:
            best_of: returns the step of a run with the lowest validation loss among the given ones.
            ruined_from: returns the first step of a run whose weights are ruined; infinite if none is.
        """
        self.folder = folder
        self.best_of, self.ruined_from = best_of, ruined_from
        self.model = model
        self.mesh = next(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        self.optimizer = optimizer
        self.config = config
        self.process = process
        self.notes: list[str] = []  # set by a load, for the log: damaged checkpoints
        self.forked_from: Path | None = None  # set by a load: the checkpoint, if it belongs to a different run
        self.damaged: list[int] = []  # set by a load: newer damaged steps; saving such a step replaces it
        self.protect: set[int] = set()  # steps that retention must not delete
        # a save in the background needs its own group, separate from training and loads
        self.group = untimed_group() if config.async_save or process.untimed is None else process.untimed
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._operation = ""  # for the watchdog
        self._copies: Tensors = {}  # on the host, reused by each save in the background

    @abstractmethod
    def snapshot(self, background: bool) -> Write:
        """Gather or copy the tensors, while training waits. Collective. Returns the function that writes them.

        Args:
            background: whether the returned function runs while training goes on, and so must write copies.
        """

    @abstractmethod
    def load(self, values: Mapping[str, Any]) -> TrainState | None:
        """Load the checkpoint to resume from, and return its state; None if there is none."""

    def parts(self) -> Parts:
        """Return the live tensors, grouped by the file that holds them in a full checkpoint."""
        model, optimizer = own_tensors(self.model), optimizer_tensors(self.model, self.optimizer)
        return {storage.MODEL: model, storage.OPTIMIZER: optimizer}

    def save(self, state: TrainState) -> None:
        """Save model, optimizer and state; with `async_save`, write in the background.

        Never raises: `wait` returns the outcome.
        """
        assert self._thread is None, "wait for the previous save first"
        background, began = self.config.async_save, time.perf_counter()
        self._operation = f"saving step {state.step}"
        writes: list[Write] = []
        failed: Exception | None = None
        try:  # writing has collectives, so all ranks begin it or none
            with progress.doing(self._operation):
                on_all(lambda: writes.append(self.snapshot(background)), self.group)
        except Exception as error:  # e.g. one rank has no memory for the copies
            failed = error
        n_bytes, blocked_s = self._n_bytes(), time.perf_counter() - began

        def finish() -> None:
            saved = Saved(state.step, storage.step_folder(self.folder, state.step))
            try:
                if failed:
                    raise failed
                with progress.doing(self._operation):
                    n_written = self._write_and_commit(state, writes[0], n_bytes)
                saved = replace(saved, bytes=n_written, note=self._delete_old(state.step))
            except Exception as error:  # also from a collective, if a rank is lost
                saved = replace(saved, error=text_of(error))
            seconds = time.perf_counter() - began
            self._saved = replace(saved, seconds=seconds, blocked_s=blocked_s if background else seconds)

        if background:
            self._thread = threading.Thread(target=finish, name="save", daemon=True)
            self._thread.start()
        else:
            finish()

    def host_copies(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Copy tensors to the host; of a DTensor, only this rank's shard. Copies from a GPU use pinned memory."""
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if name not in self._copies or self._copies[name].shape != local.shape:
                self._copies[name] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._copies[name].copy_(local, non_blocking=True)
            progress.advance(local.nbytes)
        if self.process.device.type == "cuda":
            torch.cuda.synchronize()
        return {name: self._copies[name] for name in tensors}

    def _n_bytes(self) -> int:
        """Return the size of a checkpoint in bytes, without its JSON."""
        return sum(t.nbytes for tensors in self.parts().values() for t in tensors.values())

    def _write_and_commit(self, state: TrainState, write: Write, n_bytes: int) -> int:
        """Write and commit a checkpoint, and return its size. Raises if the disk has less than `n_bytes` free."""

        @progress.working("making its folder")
        def make_folder() -> str:
            storage.remove_leftovers(self.folder)
            storage.require_space(self.folder, n_bytes)
            return str(storage.new_folder(self.folder, state.step))

        folder = Path(on_rank0(make_folder, self.group))

        def write_files() -> dict[str, Any]:
            return {name: asdict(record) for name, record in write(folder).items()}

        @progress.working("committing its folder")
        def commit() -> None:
            storage.commit(folder, state, self.config.state_dict, self.process.world_size, files)

        try:
            written = on_all(write_files, self.group)
            files = {name: FileRecord(**record) for records in written for name, record in records.items()}
            on_rank0(commit, self.group)
        except Exception:
            if self.process.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return sum(record.bytes for record in files.values())

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
        on_rank0(lambda: check(self.folder, self._n_bytes()), self.process.untimed)

    def _delete_old(self, step: int) -> str:
        """Apply retention, on rank 0. Returns the error, which does not fail the save."""
        if self.process.rank != 0:
            return ""
        try:
            purge(self.folder, self._kept(storage.find_steps(self.folder), step))
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


def purge(checkpoints: Path, keep: Iterable[int]) -> None:
    """Delete all checkpoints except those of the steps in `keep`.

    Raises:
        OSError, UnreadableError: a checkpoint can't be read or renamed; the next save tries again.
    """
    for step in sorted({*storage.find_steps(checkpoints)} - {*keep}):
        shutil.rmtree(storage.move_to_trash(storage.step_folder(checkpoints, step)), ignore_errors=True)
