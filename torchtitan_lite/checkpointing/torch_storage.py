"""torch's storage classes for safetensors, with hashes, synced files, and only the headers that a rank needs.

DCP plans on each rank for itself (`no_dist=True`), so ranks exchange no plans, which would be pickles.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchtitan_lite import progress
from torchtitan_lite.checkpointing.safetensors_file import FileRecord
from torchtitan_lite.checkpointing.shards import Reads
from torchtitan_lite.errors import CheckpointError

# of no_dist=True
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)


class SyncingWriter(HuggingFaceStorageWriter):
    """Passes the rows that DCP has planned to `write`. `records` then has the written file.

    (torch's own writer has no hash, holds the whole file in memory, and syncs before Python's buffer is flushed.)

    Args:
        write: writes a file of rows, given a function that returns a tensor's rows by its name.
    """

    def __init__(self, folder: Path, write: Callable[[Callable[[str], Any]], dict[str, FileRecord]]) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.write, self.records = write, dict[str, FileRecord]()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # torch's makes the folder, also on a machine that does not share it

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = {item.index.fqn: item for item in plan.items}
        self.records = self.write(lambda name: planner.resolve_data(items[name]))
        return super().write_data(SavePlan([]), planner)  # torch has nothing left to write


class PartsReader(HuggingFaceStorageReader):
    """Reads only the files that this rank needs. (torch's own reader reads the header of every file on every rank.)"""

    def __init__(self, reads: Reads) -> None:
        super().__init__(str(reads.folder))
        self.specs = reads.places.specs
        self.fs.ls = lambda path: [str(reads.folder / file) for file in reads.files]  # type: ignore[method-assign]

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        for name, entry in metadata.state_dict_metadata.items():
            entry.size = torch.Size(self.specs[name][1])  # type: ignore[union-attr]  # torch's is that of the parts in these files
        return metadata

    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        super()._process_read_request(f, req, planner)
        progress.advance(req.lengths.numel() * self.specs[req.storage_index.fqn][0].itemsize)


@contextlib.contextmanager
def failures(folder: Path) -> Iterator[None]:
    """Turn DCP's error into a CheckpointError: it is a BaseException, which `except Exception` does not catch."""
    try:
        yield
    except CheckpointException as error:
        said = "; ".join(str(failure[0]) for failure in error.failures.values())
        raise CheckpointError(f"{folder}: {said}") from error
