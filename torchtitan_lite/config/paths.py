"""Paths from the user: `~`, problems, prepared folders, and the search for text."""

import contextlib
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lite.errors import ConfigError, DataError


def is_url(path: str | Path) -> bool:
    """Return whether a path is the URL of object storage. (As a Path, it has one slash.)"""
    match = re.match(r"([a-z][a-z0-9]+):/", str(path))
    return bool(match and match[1] not in ("http", "https", "hf"))


def expand(path: str | Path) -> Path:
    """Replace `~`, or `~name` if there is such a user. Of a URL, return a copy in the cache.

    Raises:
        ConfigError: there is nothing at the URL.
    """
    if is_url(path):
        from torchtitan_lite.bucket import copy_of

        scheme, _, rest = str(path).partition(":")
        return copy_of(f"{scheme}:/{'/' * (scheme == 'file')}/{rest.strip('/')}")
    return Path(os.path.expanduser(path))


def problem(path: str | Path) -> str:
    """Return why a file or folder can't be read; empty if it can. Does not open it."""
    try:
        expand(path).stat()
    except FileNotFoundError:
        return f"nothing at {path} (looked in {Path.cwd()})"
    except (ConfigError, OSError) as error:
        return str(error)
    return "" if os.access(expand(path), os.R_OK) else f"{path}: permission denied to uid {os.geteuid()}"


def not_downloaded(path: str | Path) -> str:
    """Return the end of a message about a missing path that is a URL, or may be a name on the Hugging Face hub."""
    name, parent = str(path), Path(path).parent
    is_name = re.fullmatch(r"[A-Za-z][\w-]*|\w[\w.-]*/\w[\w.-]*", name) and (parent == Path() or not parent.is_dir())
    how = (
        "; nothing is downloaded here: if it is on the Hugging Face hub, fetch it with hf download "
        f"{name if is_name else 'NAME'} --local-dir FOLDER (text with --repo-type dataset), and name that folder"
    )
    return how if is_name or re.match(r"\w+:/", name) else ""


def is_prepared(path: str | Path) -> bool:
    """Return whether a folder is prepared, by its files; or a URL, which is not read.

    An unreadable folder gives False: reading it reports the error.
    """
    return is_url(path) or all(os.path.isfile(expand(path) / name) for name in ("meta.json", "tokenizer.json"))


# --- the search for text ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn an OSError into a DataError about its file, or about this path."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or path} can't be read: {error.strerror or error}") from None


def matching(entry: str) -> list[Path]:
    """Return the path itself if it exists, even with `[` or `*` in its name; else its glob matches, sorted.

    Raises:
        DataError: it can't be read.
    """
    path = expand(entry)
    with reading(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.lstat()
        return [path]
    return [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]


def files_below(folder: Path, *, hidden: bool = False) -> list[Path]:
    """Return all files in a folder and its subfolders, sorted. Follows links; reads each folder once.

    Args:
        hidden: enter folders whose names begin with a dot. If false, the folder itself is in the list.

    Raises:
        DataError: a folder that may hold text can't be listed.
    """
    files, left, seen = list[Path](), [folder], set[str]()
    with reading(folder):
        while left:
            here = left.pop()
            if (real := os.path.realpath(here)) in seen:
                continue
            seen.add(real)
            for entry in sorted(here.iterdir(), reverse=True):
                (left if (hidden or not entry.name.startswith(".")) and entry.is_dir() else files).append(entry)
    return sorted(files)


def unfound(entry: str) -> str:
    """Return why an entry of `[data] path` matches nothing; empty if it matches something, or is a URL."""
    try:
        if is_url(entry) or matching(entry):
            return ""
        return f"nothing found at {entry} (looked in {Path.cwd()}){not_downloaded(entry)}"
    except DataError as error:
        return str(error)
