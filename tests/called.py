"""What `run_distributed` starts on each rank: calls a function in a process group, and keeps what it returns."""

import importlib
import pickle
from collections.abc import Sequence
from pathlib import Path

from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.distributed.process_group import process_group


def main(argv: Sequence[str]) -> int:
    """`FOLDER MODULE FUNCTION`: FOLDER/call has the arguments, FOLDER/RANK gets the result."""
    folder, module, name = argv
    fn = getattr(importlib.import_module(module), name)
    args, kwargs = pickle.loads((Path(folder) / "call").read_bytes())
    with process_group(RunConfig(device="cpu", threads=1)) as process:
        (Path(folder) / str(process.rank)).write_bytes(pickle.dumps(fn(process, *args, **kwargs)))
    return 0
