"""One save across all ranks, synchronous or in the background.

Each rank prepares what it will write (state dicts, copies) while training waits. The ranks then agree that all have
succeeded, rank 0 makes the folder, all write their files into it and exchange errors, and rank 0 commits (storage.py).
An error never stops a run here: every rank gets it as the outcome.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from torchtitan_lite.checkpointing import progress, select, storage
from torchtitan_lite.checkpointing.safetensors_file import FileRecord
from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed.agreement import outcome_on_rank0
from torchtitan_lite.distributed.process_group import World, from_all_ranks, untimed_group

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


class Saver:
    """Writes checkpoints into a folder, one at a time."""

    def __init__(self, folder: Path, config: CheckpointConfig, world: World) -> None:
        self.folder = folder
        self.config = config
        self.world = world
        self.protect: set[int] = set()  # steps that retention must not delete
        self.older_by = 0  # also keep the newest checkpoint that is at least this many steps old, and all later ones
        self.group = untimed_group()  # not shared: a save may run in the background of training and of loads
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._what = ""  # for the watchdog

    def start(self, state: TrainState, prepare: Callable[[], tuple[Write, int]], *, background: bool) -> None:
        """Write a checkpoint. `wait` returns the outcome.

        Args:
            prepare: called first, while training waits. Returns the function that writes, and the size in bytes.
        """
        assert self._thread is None, "wait for the previous save first"
        began = time.perf_counter()
        self._what = f"saving step {state.step}"
        prepared: tuple[Write, int] | str
        try:
            prepared = prepare()
        except Exception as caught:  # such as no memory for the copies, on this rank alone
            prepared = self._text(caught)
        stopped_s = time.perf_counter() - began

        def run() -> None:
            size = 0
            try:
                with progress.doing(self._what):
                    error, size = self._save(state, prepared)
            except Exception as caught:  # from a collective: another rank is lost
                error = str(caught) or repr(caught)
            folder = storage.step_folder(self.folder, state.step)
            note = "" if error else self._delete_old(state.step)
            seconds = time.perf_counter() - began
            self._saved = Saved(state.step, folder, size, seconds, stopped_s if background else seconds, error, note)

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
            with progress.doing(self._what):
                self._thread.join()
            self._thread = None
        saved, self._saved = self._saved, None
        return saved

    def _save(self, state: TrainState, prepared: tuple[Write, int] | str) -> tuple[str, int]:
        """Returns the error and the size in bytes."""
        failed = prepared if isinstance(prepared, str) else ""
        _, error = self._exchange({}, failed)  # writing has collectives, so all ranks begin it or none
        if error or isinstance(prepared, str):
            return error, 0
        write, n_bytes = prepared
        folder, error = self._on_rank0(lambda: self._begin(state.step, n_bytes))
        if error or folder is None:
            return error, 0
        mine: dict[str, FileRecord] = {}
        try:
            mine = write(folder)
        except Exception as caught:  # any error: the other ranks must not wait for this one
            error = self._text(caught)
        files, error = self._exchange(mine, error)

        def commit() -> Path:
            if error:
                raise OSError(error)
            return storage.commit(folder, state, self.config.state_dict, self.world.world_size, files)

        _, error = self._on_rank0(commit)
        if error:
            if self.world.rank == 0:
                storage.abandon(folder)
            return error, 0
        return "", sum(record.bytes for record in files.values())

    def _exchange(self, mine: dict[str, FileRecord], error: str) -> tuple[dict[str, FileRecord], str]:
        """The files and the errors of all ranks, on every rank."""
        found = from_all_ranks(({name: asdict(record) for name, record in mine.items()}, error), self.group)
        files = {name: FileRecord(**record) for records, _ in found for name, record in records.items()}
        return files, "; ".join(dict.fromkeys(text for _, text in found if text))

    def _text(self, error: Exception) -> str:
        """The error, with the rank that has it."""
        text = str(error) or repr(error)
        return text if text.startswith("rank ") else f"rank {self.world.rank}: {text}"

    def _delete_old(self, step: int) -> str:
        """Apply retention, on rank 0. Returns the error, which does not fail the save."""
        if self.world.rank != 0:
            return ""
        c, keep = self.config, {*self.protect, step}
        try:
            steps = storage.find_steps(self.folder)
            keep.update(steps[max(sum(found <= step - self.older_by for found in steps) - 1, 0) :])
            select.purge(self.folder, select.to_keep(self.folder, c.keep_latest, c.keep_every, c.keep_best, keep))
        except Exception as caught:
            return str(caught) or repr(caught)
        return ""

    def _begin(self, step: int, n_bytes: int) -> Path:
        storage.require_space(self.folder, n_bytes)
        return storage.begin(self.folder, step)

    def _on_rank0(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """The result or the error of an action on rank 0, on every rank."""
        work = progress.as_work("making or committing its folder", action)
        return outcome_on_rank0(self.world.rank, work, self.group)
