"""A front door with another stdout: STREAM_ENTRY's main, STREAM_OUT a file, "closed" or "broken", STREAM_ENCODING."""

import importlib
import io
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    out = os.environ["STREAM_OUT"]
    reading, writing = os.pipe()
    os.close(1)
    if out == "closed":
        sys.stdout = None  # what Python does
    else:
        if out == "broken":
            os.dup2(writing, 1)
            os.close(reading)
        else:
            assert os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND) == 1
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), encoding=os.environ["STREAM_ENCODING"])
    code: int = importlib.import_module(os.environ["STREAM_ENTRY"]).main(argv)
    return code
