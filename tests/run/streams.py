"""A front door with another stdout, an entry of `ranks`: `OUT ENCODING ENTRY arguments`.

With COLUMNS=60 in the environment, stdout and stderr are a terminal of that width.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str]) -> int:
    out, encoding, entry, *arguments = argv
    sys.stdout = open(out, "a", encoding=encoding)  # noqa: SIM115  # stays open
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream in streams:
        stream.isatty = lambda: os.environ.get("COLUMNS") == "60"
    code: int = importlib.import_module(entry).main(arguments)
    return code
