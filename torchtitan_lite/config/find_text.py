"""The search for text: paths, globs and folders."""

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lite.config.paths import expand
from torchtitan_lite.errors import DataError, UserError


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn an OSError into a DataError about its file, or about this path."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or path} can't be read: {error.strerror or error}") from None


def kind_of(path: Path) -> str:
    """What a path leads to, for messages."""
    return "a folder" if path.is_dir() else "a file" if path.is_file() else "not a regular file"


def matching(entry: str) -> list[Path]:
    """The path itself if it exists, even with `[` or `*` in its name; else the files and folders that match it, sorted.

    Raises:
        UserError: it can't be read, or its `~` is unknown.
    """
    path = expand(entry)
    with reading(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.lstat()
        return [path]
    return [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]


def files_below(folder: Path) -> list[Path]:
    """All files in a folder and its subfolders, sorted. Linked folders are followed; each folder is read once.

    Raises:
        DataError: a folder can't be listed: it may hold text.
    """

    def fail(error: OSError) -> None:
        raise error

    def is_new(path: str) -> bool:
        real = os.path.realpath(path)
        new = real not in seen
        seen.add(real)
        return new

    files, seen = list[Path](), {os.path.realpath(folder)}
    with reading(folder):
        for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
            files += [Path(here, name) for name in names]
            folders[:] = [name for name in sorted(folders) if is_new(os.path.join(here, name))]
    return sorted(files)


def unfound(entry: str) -> str:
    """Why an entry of `[data] path` matches nothing; empty if it matches something."""
    try:
        return "" if matching(entry) else f"nothing found at {entry}"
    except UserError as error:
        return str(error)
