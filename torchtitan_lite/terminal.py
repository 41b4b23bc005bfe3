"""Printing to stdout and stderr without errors, whatever the text and the stream's state."""

import contextlib
import functools
import io
import os
import sys
from collections.abc import Collection, Sequence


def prepare_streams() -> None:
    """Escape unencodable characters on stdout and stderr, and replace a closed stream by /dev/null.

    Entry points call it first. Otherwise the next opened file would get the closed stream's descriptor, and receive
    library output.
    """
    with contextlib.suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115  # stays open
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, stream)


def counted(n: int, what: str) -> str:
    """Format a count: 1 file, 1,234 files."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format seconds: 4m12s, 2h05m, 3d04h."""
    s = round(seconds)
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s" if s >= 60 else f"{s}s"
    return f"{s // 3600}h{s % 3600 // 60:02d}m" if s < 86400 else f"{s // 86400}d{s % 86400 // 3600:02d}h"


def size(n_bytes: float) -> str:
    """Format bytes: 1.50 GiB, 20.25 MiB, 512 bytes."""
    if 0 < n_bytes < 2**20 / 100:
        return counted(round(n_bytes), "byte")
    return f"{n_bytes / 2**30:,.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:,.2f} MiB"


def columns(rows: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return one aligned line per row. The columns numbered in `right` are right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def print_line(text: str) -> None:
    """Print a line. A full or closed stdout is reported once, on stderr."""
    try:
        print(text, flush=True)
    except (OSError, ValueError) as error:  # ValueError: the stream is closed
        print_error_once(f"stdout can't be written: {error}")


def print_error(text: str) -> None:
    """Print a line to stderr, if possible."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


print_error_once = functools.cache(print_error)  # the first time only


def flush() -> None:
    """Flush stdout and stderr, if possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
