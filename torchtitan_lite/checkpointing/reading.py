"""Reading the files of a checkpoint. An I/O error is not damage."""

import json
import stat
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import CheckpointError, UnreadableError

MISSING = (
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
)  # these mean a damaged checkpoint, any other OSError an I/O error


def unreadable(path: Path, error: OSError) -> UnreadableError:
    """The error for a file that can't be read now, but may be intact."""
    return UnreadableError(
        f"{path} can't be read: {error.strerror or error}. This is an I/O error, not damage, and "
        "nothing was changed. Make the file readable and start the same command again"
    )


def is_file(path: Path) -> bool:
    """Path.is_file, but an I/O error raises UnreadableError; newer versions of Python return False."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except MISSING:
        return False
    except OSError as error:
        raise unreadable(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        UnreadableError: an I/O error.
        CheckpointError: it is missing, not a JSON object, or has a duplicate key.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_key_twice)
    except (*MISSING, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r}") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    return content


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key appears twice")
    return content
