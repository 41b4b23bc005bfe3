"""Atomic writes of files, and appends that survive a truncated last line."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Add the file's name to an error of writing it."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(file)
        raise


def flush_to_disk(stream: Any) -> None:
    with naming(stream.name):
        stream.flush()
        os.fsync(stream.fileno())


def write_durably(file: Path, content: bytes) -> None:
    """Write a file atomically. If several processes write it at the same time, one of them wins."""
    temporary = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with naming(file), temporary.open("wb") as stream:  # naming is outside: closing retries a failed write
            stream.write(content)
            flush_to_disk(stream)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_line(file: Path, text: str, *, durably: bool = False) -> None:
    """Append a line. If a kill or a full disk has truncated the last line, start a new one."""
    with naming(file), file.open("ab+") as stream:
        if end := stream.seek(0, os.SEEK_END):
            stream.seek(end - 1)
        start = "" if stream.read(1) in (b"", b"\n") else "\n"
        stream.write(f"{start}{text}\n".encode(errors="backslashreplace"))
        if durably:
            flush_to_disk(stream)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
