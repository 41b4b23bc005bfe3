"""The search for text: globs, folders with links in them, and why nothing was found.

A folder that can't be listed is an error. Links to folders are followed; a link back to a folder that was already found
adds nothing.
"""

import contextlib
import errno
import fnmatch
import glob
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.errors import DataError


def expanded(path: str | Path, key: str) -> Path:
    """`expand` for data: replace `~`; `key` names the option in messages.

    Raises:
        DataError: the home folder is unknown, or the path contains a NUL.
    """
    text = os.fspath(path)
    if "\0" in text:
        raise DataError(f"{key}: {text!r} contains a NUL character, which no path can")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise DataError(
            f"{key}: the home folder in {text} is unknown (HOME is not set, or there is no such user); "
            "write the full path"
        ) from None


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn an OSError into a DataError about this path."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from None


def _mode(path: str | Path) -> int:
    """The mode of a path's target; 0 if there is none."""
    with reading(path):
        try:
            return os.stat(path).st_mode
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return 0
            raise


def kind_of(path: Path) -> str:
    """The type of a path's target, for messages."""
    special = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    names = {0: "a broken link", stat.S_IFDIR: "a folder", **special}
    return names.get(stat.S_IFMT(_mode(path)), "a file")


@dataclass(frozen=True)
class Folder:
    """A folder and its entries."""

    path: Path
    linked: bool  # reached through a link
    names: list[str]  # entries other than folders


def folders_below(root: Path, hidden: bool) -> list[Folder]:
    """The folder and all folders below it, each once. Links are followed after the real folders."""
    seen: set[tuple[int, int]] = set()
    folders: list[Folder] = []
    links = [root]
    while links:
        links.sort()
        todo = [links.pop(0)]
        linked = bool(folders)
        while todo:
            folder = todo.pop()
            with reading(folder):
                info = folder.stat()
                if (info.st_dev, info.st_ino) in seen:
                    continue
                seen.add((info.st_dev, info.st_ino))
                entries = [entry for entry in os.scandir(folder) if hidden or not entry.name.startswith(".")]
            names = []
            for entry in entries:
                if not is_folder(folder / entry.name):
                    names.append(entry.name)
                else:
                    (links if entry.is_symlink() else todo).append(folder / entry.name)
            folders.append(Folder(folder, linked, names))
    return folders


def matching(pattern: Path) -> list[tuple[Path, bool]]:
    """The paths that match a glob, sorted, and whether `**` reached each through a link.

    Like `glob.glob(..., recursive=True)`, but safe in a loop of links. An existing path matches itself, even if its
    name contains `[` or `*`.

    Raises:
        DataError: a folder can't be read.
    """
    with reading(pattern), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        pattern.lstat()
        return [(pattern, False)]
    matches = {Path(pattern.anchor): False}
    parts = pattern.parts[1:] if pattern.anchor else pattern.parts
    for number, part in enumerate(parts):
        matches = _step(matches, part, "**" in parts[:number], last=number == len(parts) - 1)
    return [(path, matches[path]) for path in sorted(matches, key=str)]


def _step(bases: dict[Path, bool], part: str, below_stars: bool, last: bool) -> dict[Path, bool]:
    """Extend the matched paths by the next part of the pattern."""
    matches: dict[Path, bool] = {}

    def add(path: Path, linked: bool) -> None:
        linked = linked or (below_stars and path.is_symlink() and is_folder(path))
        matches[path] = matches.get(path, True) and linked

    for base, linked in bases.items():
        if part == "**":
            for folder in folders_below(base, hidden=False) if is_folder(base) else []:
                if not last or folder.path != Path():  # as in glob: "**" does not match the folder itself
                    add(folder.path, linked or folder.linked)
                for name in folder.names if last else []:
                    add(folder.path / name, linked or folder.linked)
        elif glob.has_magic(part) and is_folder(base):
            with reading(base):
                names = fnmatch.filter(os.listdir(base), part)
            for name in names:
                if part.startswith(".") or not name.startswith("."):
                    add(base / name, linked)
        elif os.path.lexists(base / part):
            add(base / part, linked)
    return matches


def unfound(entry: str) -> str:
    """Why an entry of `[data] path` matches nothing; empty if it matches something."""
    try:
        return "" if matching(expanded(entry, "data.path")) else f"nothing found at {entry}"
    except DataError as error:
        return str(error)


def is_file(path: Path) -> bool:
    """Whether this is a regular file, or a link to one. Raises DataError if permission is denied."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Whether this is a folder, or a link to one. Raises DataError if permission is denied."""
    return stat.S_ISDIR(_mode(path))
