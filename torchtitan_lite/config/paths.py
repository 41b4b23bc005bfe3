"""Paths from the user: `~`, globs, symbolic links and prepared folders.

A search for text skips nothing silently: an unreadable folder is an error. Links to folders are followed, and each
folder is visited once.
"""

import argparse
import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lite.errors import ConfigError, DataError, shortened


def expand(path: str | Path) -> Path:
    """Replace `~` or `~name`.

    Raises:
        ConfigError: the user or the home folder is unknown.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        name = Path(path).parts[0]
        why = f"there is no user {name[1:]}" if name != "~" else f"HOME is not set, and uid {os.getuid()} has no name"
        raise ConfigError(f"{path}: {name} is not known: {why}; write the path in full") from None


def argument(text: str) -> Path:
    """The argparse `type` of a path."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path")
    try:
        return expand(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def problem(path: str | Path) -> str:
    """Why a file or folder can't be read; empty if it can. Does not open it."""
    try:
        where = expand(path)
        is_folder = stat.S_ISDIR(where.stat().st_mode)
    except ConfigError as error:
        return str(error)
    except FileNotFoundError:
        return f"nothing at {shortened(path)} (looked in {Path.cwd()})"
    except (OSError, ValueError) as error:  # ValueError: a NUL
        return f"{shortened(path)}: {getattr(error, 'strerror', None) or error}"
    effective = os.access in os.supports_effective_ids
    if not os.access(where, os.R_OK | os.X_OK if is_folder else os.R_OK, effective_ids=effective):
        return f"{path}: permission denied to uid {os.geteuid()}"
    return ""


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


def _mode(path: str | Path) -> int | None:
    """The mode of a path's target; None if there is none."""
    with reading(path):
        try:
            return os.stat(path).st_mode
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise


def kind_of(path: Path) -> str:
    """The type of a path's target, for messages."""
    mode = _mode(path)
    if mode is None:
        return "a broken link"
    names = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
    return next((name for test, name in names.items() if test(mode)), "a folder" if stat.S_ISDIR(mode) else "a file")


_LONGEST_META = 256 << 20  # bytes


def is_prepared(path: str | Path) -> bool:
    """Whether this is a prepared folder: it has our meta.json, or a damaged one next to our other files.

    A folder of text may hold an unrelated meta.json. An unreadable folder gives False: reading it reports the error.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        folder = Path(path).expanduser()
        file = folder / "meta.json"
        if not file.is_file():
            return False
        if {"tokenizer.json", "train.idx"} <= {entry.name for entry in os.scandir(folder)}:
            return True
        if file.stat().st_size <= _LONGEST_META:
            content = json.loads(file.read_bytes())
            return isinstance(content, dict) and {"format_version", "tokens_sha256"} <= content.keys()
    return False
