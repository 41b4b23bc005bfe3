"""What a damaged folder of prepared data also holds, and how to repair it."""

import os
import re
from pathlib import Path

OURS = re.compile(
    r"(train|val)(-\d+\.bin|\.idx)|skipped\.log|(meta|progress|tokenizer)\.json(\.new)?"
    r"|packed-\d+-[0-9a-f]+(\.partial|\.lock)?"
)  # the names in a prepared folder
_PACKED = re.compile(r"(train|val)\.(pieces|rows)|hashes\.json(\.new)?")  # in a packed-* folder


def foreign(folder: Path) -> list[str]:
    """The entries of a folder that are not part of prepared data, sorted."""
    names = []
    for entry in os.scandir(folder):
        if not OURS.fullmatch(entry.name):
            names.append(entry.name)
        elif entry.is_dir():  # of packing.py
            names += [f"{entry.name}/{name}" for name in os.listdir(entry) if not _PACKED.fullmatch(name)]
    return sorted(names)


def remedy(folder: Path) -> str:
    """How to repair a damaged folder. The user is never told to delete foreign files."""
    try:
        others = foreign(folder)
    except OSError as error:
        return f"it can't be listed: {error.strerror}"
    if others:
        return f"prepare the text again into another folder; keep this one, which also holds {others[0]}"
    return "delete this folder, and prepare it again (train.py does so itself for a folder in its cache)"
