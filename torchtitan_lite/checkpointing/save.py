"""One checkpoint from "go" to "it counts" or "it does not", the same on every rank; now, or beside training.

storage.py has the protocol of files. This adds the ranks: rank 0 makes the folder, all write their files into it, all
tell whether they could, and rank 0 commits. No error stops a run here: it comes back as the outcome, on every rank.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from torchtitan_lite.checkpointing import progress, select, storage
from torchtitan_lite.checkpointing.safetensors_file import FileRecord
from torchtitan_lite.checkpointing.storage import TrainState
from torchtitan_lite.config.schema import CheckpointConfig
from torchtitan_lite.distributed.agreement import outcome_on_rank0
from torchtitan_lite.distributed.process_group import World, untimed_group

T = TypeVar("T")
Write = Callable[[Path], dict[str, FileRecord]]  # writes this rank's files into a folder that exists


@dataclass(frozen=True)
class Saved:
    """What came of a save; it counts if `error` is empty."""

    step: int
    folder: Path
    bytes: int
    seconds: float
    stopped_s: float  # how long training stood still
    error: str
    note: str = ""  # on rank 0: why older checkpoints were not deleted


class Saver:
    """Writes checkpoints into a folder, one at a time.

    Args:
        protect: steps that retention must not delete.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, world: World) -> None:
        self.folder = folder
        self.config = config
        self.world = world
        self.protect: set[int] = set()
        # a group of its own: saves run beside training, and may take longer than a step is allowed to
        self.group = untimed_group()
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None

    def start(self, state: TrainState, write: Write, n_bytes: int, began: float, *, beside: bool) -> None:
        """Write a checkpoint, beside training or now. `wait` says what came of it.

        Args:
            n_bytes: what it will take.
            began: when training stopped for it, by time.perf_counter.
        """
        assert self._thread is None, "wait for the save before"
        stopped_s = time.perf_counter() - began

        def run() -> None:
            folder, error, size = storage.step_folder(self.folder, state.step), "", 0
            try:
                with progress.doing(f"saving step {state.step}"):
                    folder, error, size = self._save(state, write, n_bytes)
            except Exception as caught:  # of the agreement itself: another rank is lost
                error = str(caught) or repr(caught)
            note = "" if error else self._delete_old(state.step)
            seconds = time.perf_counter() - began
            self._saved = Saved(state.step, folder, size, seconds, stopped_s if beside else seconds, error, note)

        if beside:
            self._thread = threading.Thread(target=run, name="save", daemon=True)
            self._thread.start()
        else:
            run()

    def finished(self) -> bool:
        """Whether `wait` would return at once with an outcome. Ranks may differ."""
        return self._saved is not None and (self._thread is None or not self._thread.is_alive())

    def wait(self) -> Saved | None:
        """What came of the last save, once; None if there was none. It waits for a running one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        saved, self._saved = self._saved, None
        return saved

    def _save(self, state: TrainState, write: Write, n_bytes: int) -> tuple[Path, str, int]:
        """Folder, error and size."""
        folder, error = self._on_rank0(lambda: self._begin(state.step, n_bytes))
        if error or folder is None:
            return storage.step_folder(self.folder, state.step), error, 0
        mine: dict[str, FileRecord] = {}
        try:
            mine = write(folder)
        except Exception as caught:  # whatever it is: the others must not wait for this rank
            text = str(caught) or repr(caught)
            error = text if text.startswith("rank ") else f"rank {self.world.rank}: {text}"
        found: list[tuple[dict[str, FileRecord], str] | None] = [None] * self.world.world_size
        dist.all_gather_object(found, (mine, error), group=self.group)
        answers = [answer for answer in found if answer is not None]
        error = "; ".join(dict.fromkeys(text for _, text in answers if text))
        files = {name: record for records, _ in answers for name, record in records.items()}

        def commit() -> Path:
            if error:
                raise OSError(error)
            kind = self.config.state_dict
            return storage.commit(folder, state, kind, self.world.world_size, files)

        final, error = self._on_rank0(commit)
        if error or final is None:
            if self.world.rank == 0:
                storage.abandon(folder)
            return storage.step_folder(self.folder, state.step), error, 0
        return final, "", sum(record.bytes for record in files.values())

    def _delete_old(self, step: int) -> str:
        """What retention deletes, on rank 0. Returns why it could not, which is no error of the save."""
        if self.world.rank != 0:
            return ""
        c, keep = self.config, {*self.protect, step}
        try:
            select.purge(self.folder, select.to_keep(self.folder, c.keep_latest, c.keep_every, c.keep_best, keep))
        except Exception as caught:
            return str(caught) or repr(caught)
        return ""

    def _begin(self, step: int, n_bytes: int) -> Path:
        storage.require_space(self.folder, n_bytes)
        return storage.begin(self.folder, step)

    def _on_rank0(self, action: Callable[[], T]) -> tuple[T | None, str]:
        """The result, or else the error, of what rank 0 does; on every rank."""
        making = progress.within("making or committing its folder", action)
        return outcome_on_rank0(self.world.rank, making, self.group)
