"""Writing to stdout and stderr in a way that can't end a run: whatever the text is, and whatever the stream is."""

import contextlib
import io
import os
import sys
from typing import TextIO


def prepare_streams() -> None:
    """Have stdout and stderr escape what their encoding lacks, and put /dev/null where a stream was closed.

    Front doors call it first. A file that is opened later would otherwise take the place of a closed stream, and get
    what libraries print.
    """
    with contextlib.suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(descriptor)
    sys.stdout, sys.stderr = _prepared(sys.stdout), _prepared(sys.stderr)


def _prepared(stream: TextIO | None) -> TextIO:
    if stream is None:  # what Python makes of a stream that is closed when it starts
        return open(os.devnull, "w", encoding="utf-8")  # for as long as the process lives
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return stream


def encodable(text: str, stream: TextIO) -> str:
    """The text, with escapes for the characters that a stream can't encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_line(text: str) -> None:
    """Print a line. That stdout is full or closed is reported once, on stderr."""
    try:
        print(encodable(text, sys.stdout), flush=True)
    except (OSError, ValueError) as error:  # ValueError: the stream is closed
        complain_once(f"stdout can't be written: {error}")


def print_error(text: str) -> None:
    """Print a line to stderr, if that can be written."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(encodable(text, sys.stderr), file=sys.stderr, flush=True)


_complained: set[str] = set()


def complain_once(text: str) -> None:
    """The same; a text is printed once."""
    if text not in _complained:
        _complained.add(text)
        print_error(text)


def flush() -> None:
    """Write what is buffered, as far as that can be."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
