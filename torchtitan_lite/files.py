"""Durable file writes: to a temporary file, fsync, then rename."""

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Add the file to an error of writing it, which has none; and the limit, if the file is too large."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
                error.strerror = f"{error.strerror}: the limit of this process is {limit:,} bytes (ulimit -f)"
            error.filename = str(file)
        raise


def flush_to_disk(stream: Any) -> None:
    with naming(stream.name):
        stream.flush()
        os.fsync(stream.fileno())


def write_durably(file: Path, content: bytes) -> None:
    """Write a file atomically."""
    temporary = file.with_name(f"{file.name}.new")
    with naming(temporary), temporary.open("wb") as stream:  # closing writes again what failed
        stream.write(content)
        flush_to_disk(stream)
    temporary.replace(file)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
