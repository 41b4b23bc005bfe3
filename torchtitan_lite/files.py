"""Durable file writes: to a temporary file, fsync, then rename."""

import os
from pathlib import Path
from typing import Any


def flush_to_disk(stream: Any) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def write_durably(file: Path, content: bytes) -> None:
    """Write a file atomically."""
    temporary = file.with_name(f"{file.name}.new")
    with temporary.open("wb") as stream:
        stream.write(content)
        flush_to_disk(stream)
    temporary.replace(file)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
