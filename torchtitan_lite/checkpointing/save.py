"""One save across all ranks, synchronous or in the background.

Each rank prepares what it will write (state dicts, copies) while training waits. The ranks then agree that all have
succeeded, rank 0 makes the folder, all write their files into it and exchange errors, and rank 0 commits (storage.py).
An error never stops a run here: every rank gets it as the outcome.
"""

import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpointing import progress, select, storage
from torchtitan_lite.checkpointing.progress import on_rank0
from torchtitan_lite.checkpointing.safetensors_file import FileRecord
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.tensor_names import Parts, Tensors, optimizer_tensors, own_tensors
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed.agreement import from_all_ranks, outcome_on_rank0
from torchtitan_lite.distributed.process_group import World, untimed_group
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.models import Transformer

T = TypeVar("T")
Write = Callable[[Path], dict[str, FileRecord]]  # writes this rank's files into an existing folder


@dataclass(frozen=True)
class Saved:
    """The outcome of a save; it was committed if `error` is empty."""

    step: int
    folder: Path
    bytes: int
    seconds: float
    stopped_s: float  # how long training was blocked
    error: str
    note: str = ""  # on rank 0: why older checkpoints were not deleted


class BaseCheckpointer(ABC):
    """What the four ways of checkpoint.py's Checkpointer have in common. The training loop knows it by this type."""

    def __init__(
        self,
        folder: Path,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        config: CheckpointConfig,
        world: World,
        best_of: Callable[[Sequence[int]], int | None] = lambda _: None,
    ) -> None:
        """
        Args:
            best_of: of these steps, the one with the lowest validation loss.
        """
        self.folder = folder
        self.best_of = best_of
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.world = world
        self.notes: list[str] = []  # from a load, for the log: damaged checkpoints
        self.forked_from: Path | None = None  # from a load: the checkpoint, if it is another run's
        self.damaged: list[int] = []  # from a load: newer steps; the save of such a step replaces it
        self.protect: set[int] = set()  # steps that retention must not delete
        # a save in the background of training and of loads needs a group of its own
        self.group = untimed_group() if config.async_save or world.untimed is None else world.untimed
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._operation = ""  # for the watchdog
        self._buffers: Tensors = {}  # host copies of this rank's rows, reused by each save

    @abstractmethod
    def save(self, state: TrainState) -> None:
        """Save a checkpoint, and return its outcome from `wait`."""

    @abstractmethod
    def load(self, identity: Mapping[str, Any]) -> TrainState | None:
        """Load the checkpoint that `config.resume` selects, and return its state; None if there is none."""

    def parts(self) -> Parts:
        """The live tensors, by file of a full state dict."""
        model, optimizer = own_tensors(self.model), optimizer_tensors(self.model, self.optimizer)
        return {storage.MODEL: model, storage.OPTIMIZER: optimizer}

    def require_space(self, step: int) -> None:
        """Raise CheckpointError on every rank if the disk has no room for a checkpoint after this step.

        If it needs the space, the first save deletes what retention does not keep.
        """

        def require() -> None:
            steps = storage.find_steps(self.folder)
            old = sorted({*steps} - self._kept(steps, step))
            storage.require_space(self.folder, self._n_bytes(), [storage.step_folder(self.folder, s) for s in old])

        on_rank0(self.world, require)

    def start_save(self, state: TrainState, prepare: Callable[[bool], Write]) -> None:
        """Write a checkpoint; with `async_save` in the background. Never raises: `wait` returns the outcome.

        Args:
            prepare: called at once, while training waits. Returns the function that writes; that function gets copies
                if the argument is True.
        """
        assert self._thread is None, "wait for the previous save first"
        background = self.config.async_save
        began = time.perf_counter()
        self._operation = f"saving step {state.step}"
        prepared: tuple[Write, int] | str
        try:
            prepared = prepare(background), self._n_bytes()
        except Exception as error:  # such as no memory for the copies, on this rank alone
            prepared = self._message(error)
        stopped_s = time.perf_counter() - began

        def run() -> None:
            n_bytes = 0
            try:
                with progress.doing(self._operation):
                    error, n_bytes = self._write_and_commit(state, prepared)
            except Exception as caught:  # from a collective: another rank is lost
                error = str(caught) or repr(caught)
            folder = storage.step_folder(self.folder, state.step)
            note = "" if error else self._delete_old(state.step)
            seconds = time.perf_counter() - began
            self._saved = Saved(state.step, folder, n_bytes, seconds, stopped_s if background else seconds, error, note)

        if background:
            self._thread = threading.Thread(target=run, name="save", daemon=True)
            self._thread.start()
        else:
            run()

    def finished(self) -> bool:
        """Whether `wait` would return an outcome at once. Ranks may differ."""
        return self._saved is not None and (self._thread is None or not self._thread.is_alive())

    def wait(self) -> Saved | None:
        """Wait for a running save. Returns the outcome of the last one, once; None if there was none."""
        if self._thread is not None:
            with progress.doing(self._operation):
                self._thread.join()
            self._thread = None
        saved, self._saved = self._saved, None
        return saved

    def host_copies(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Copies of this rank's rows on the host; pinned on a GPU, for speed."""
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if name not in self._buffers or self._buffers[name].shape != local.shape:
                self._buffers[name] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name].copy_(local, non_blocking=True)
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return self._buffers

    def _n_bytes(self) -> int:
        """The size of a checkpoint in bytes, without its JSON."""
        return sum(t.numel() * t.element_size() for tensors in self.parts().values() for t in tensors.values())

    def _write_and_commit(self, state: TrainState, prepared: tuple[Write, int] | str) -> tuple[str, int]:
        """Returns the error and the size in bytes.

        Args:
            prepared: the function that writes and the expected size, or the error of preparing them.
        """
        failed = prepared if isinstance(prepared, str) else ""
        _, error = self._exchange({}, failed)  # writing has collectives, so all ranks begin it or none
        if error or isinstance(prepared, str):
            return error, 0
        write, n_bytes = prepared

        def begin() -> Path:
            try:
                storage.require_space(self.folder, n_bytes)
            except CheckpointError:  # e.g. the first save with a lower keep_latest: delete first what it would after
                self._delete_old(state.step)
                storage.require_space(self.folder, n_bytes)
            return storage.begin(self.folder, state.step)

        folder, error = self._outcome_on_rank0(begin)
        if error or folder is None:
            return error, 0
        records: dict[str, FileRecord] = {}
        try:
            records = write(folder)
        except Exception as caught:  # any error: the other ranks must not wait for this one
            error = self._message(caught)
        files, error = self._exchange(records, error)

        def commit() -> Path:
            if error:
                raise OSError(error)
            return storage.commit(folder, state, self.config.state_dict, self.world.world_size, files)

        _, error = self._outcome_on_rank0(commit)
        if error:
            if self.world.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            return error, 0
        return "", sum(record.bytes for record in files.values())

    def _exchange(self, records: dict[str, FileRecord], error: str) -> tuple[dict[str, FileRecord], str]:
        """The files and the errors of all ranks, on every rank."""
        of_ranks = from_all_ranks(({name: asdict(record) for name, record in records.items()}, error), self.group)
        files = {name: FileRecord(**record) for records, _ in of_ranks for name, record in records.items()}
        return files, "; ".join(dict.fromkeys(error for _, error in of_ranks if error))

    def _message(self, error: Exception) -> str:
        """The error, with the rank that has it."""
        text = str(error) or repr(error)
        return text if text.startswith("rank ") else f"rank {self.world.rank}: {text}"

    def _outcome_on_rank0(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """The result or the error of an action on rank 0, on every rank."""
        work = progress.working("making or committing its folder")
        return outcome_on_rank0(self.world.rank, work(action), self.group)

    def _delete_old(self, step: int) -> str:
        """Apply retention, on rank 0. Returns the error, which does not fail the save."""
        if self.world.rank != 0:
            return ""
        try:
            select.purge(self.folder, self._kept(storage.find_steps(self.folder), step))
            self.damaged = [damaged for damaged in self.damaged if damaged > step]
        except Exception as caught:
            return str(caught) or repr(caught)
        return ""

    def _kept(self, steps: list[int], step: int) -> set[int]:
        """Which of these checkpoints retention keeps at a step: a damaged one only before its step is made again."""
        c, later = self.config, {saved for saved in steps if saved > step}
        steps = [saved for saved in steps if saved not in {*later, *self.damaged} - {step}]
        best = self.best_of(steps) if c.keep_best else None
        also = {*self.protect, step} | ({best} if best is not None else set())
        return later | select.to_keep(steps, c.keep_latest, c.keep_every, also)
