"""train.py on machines of one process, each with a disk of its own: rank N writes to DISKS/N."""

import functools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import train
from tests.helpers import until


def main(argv: Sequence[str]) -> int:
    rank, dies = os.environ.get("RANK", "0"), int(os.environ["DIES"])
    if "RANK" in os.environ:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if dies:
        die_at_write(dies)
    return train.main([*argv, f"--run.out_dir={os.environ['DISKS']}/{rank}"])


def die_at_write(number: int) -> None:
    """SIGKILL instead of a write of a checkpoint's file or manifest to the bucket."""
    from fsspec.implementations.dirfs import DirFileSystem

    left = number
    for name in ("put_file", "pipe_file"):

        def write(*args: Any, honest: Any, **kwargs: Any) -> None:
            nonlocal left
            if any(str(key).startswith("checkpoints/") for key in args):
                until(lambda: [*Path(os.environ["DISKS"]).glob(os.environ["WAITS_FOR"])], "a file on the disks")
                left -= 1
            if left == 0:
                print("DIES", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            honest(*args, **kwargs)

        setattr(DirFileSystem, name, functools.partialmethod(write, honest=getattr(DirFileSystem, name)))
