"""Reading the files of a checkpoint: damage is one thing, an error of the system at the moment another."""

import json
import stat
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import CheckpointError, UnreadableError

MISSING = FileNotFoundError, NotADirectoryError, IsADirectoryError  # what an OSError says about a checkpoint itself


def unreadable(path: Path, error: OSError) -> UnreadableError:
    """An error of the system, which says nothing about the content of a checkpoint."""
    return UnreadableError(
        f"{path} can't be read: {error.strerror or error}. This is an error of the system, not damage: "
        "nothing was changed. Make it readable and start the same command again"
    )


def is_file(path: Path) -> bool:
    """Path.is_file, which in newer versions of Python is False where it is not allowed to look."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except MISSING:
        return False
    except OSError as error:
        raise unreadable(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        UnreadableError: the system can't read it.
        CheckpointError: it is missing, is no JSON object, or has a key twice.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_key_twice)
    except (*MISSING, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r}") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds no table")
    return content


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key stands in it twice")
    return content
