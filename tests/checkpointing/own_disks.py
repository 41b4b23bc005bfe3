"""train.py on machines of one process, each with a disk of its own: rank N writes to DISKS/N."""

import os
from collections.abc import Sequence

import train


def main(argv: Sequence[str]) -> int:
    rank = os.environ.get("RANK", "0")
    if "RANK" in os.environ:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return train.main([*argv, f"--run.out_dir={os.environ['DISKS']}/{rank}"])
