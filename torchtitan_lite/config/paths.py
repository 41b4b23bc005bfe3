"""Paths as people write them: `~` and `~name` stand for home folders, everywhere alike."""

import argparse
import os
import stat
from pathlib import Path

from torchtitan_lite.errors import ConfigError, shortened


def expand(path: str | Path) -> Path:
    """A path with its `~` or `~name` replaced.

    Raises:
        ConfigError: there is no such user, or no home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        name = Path(path).parts[0]
        why = f"there is no user {name[1:]}" if name != "~" else f"HOME is not set, and uid {os.getuid()} has no name"
        raise ConfigError(f"{path}: {name} is not known: {why}; write the path in full") from None


def argument(text: str) -> Path:
    """The `type` of a command's option that takes a path."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is no path")
    try:
        return expand(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def problem(path: str | Path) -> str:
    """Why a file or folder can't be read; empty if it can. It is not opened."""
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
