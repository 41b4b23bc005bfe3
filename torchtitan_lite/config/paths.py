"""Paths from the user: `~`, problems, and prepared folders. find_text.py has what only the search for text needs."""

import argparse
import contextlib
import json
import os
import stat
from pathlib import Path

from torchtitan_lite.errors import ConfigError, shortened


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


def not_a_folder(path: str) -> str:
    """Why a path can't be a folder; empty if it is one, or can become one."""
    try:
        where = expand(path)
        return f"{path} can't be written: it is not a folder" if where.exists() and not where.is_dir() else ""
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return f"{shortened(path)}: {error.strerror or error}"


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
