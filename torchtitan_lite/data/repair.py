"""Folders of prepared data that can't be used: damaged, or not made for each other."""

import os
import re
from pathlib import Path
from typing import Any

from torchtitan_lite.config.schema import TokenizerConfig
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.errors import DataError

OURS = re.compile(
    r"(train|val)(-\d+\.bin|\.(idx|extents|position|n|file|at|origins))|skipped\.log"
    r"|(meta|progress|tokenizer|pairs|megatron|origins)\.json(\.new)?"
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


def different(first: Any, other: Any) -> str:
    """How two sources of a mixture (dataset.Source) differ in tokenizer or end token, and what to do."""
    if other.meta.tokenizer_sha256 != first.meta.tokenizer_sha256:
        return (
            f"{first.name} and {other.name} were prepared with different tokenizers "
            f"({first.meta.tokenizer_sha256[:12]} and {other.meta.tokenizer_sha256[:12]}); prepare one of them "
            f"again with --tokenizer {first.folder / 'tokenizer.json'}"
        )
    tokenizer = bpe.load(first.folder / "tokenizer.json")
    one, two = (bpe.shown(tokenizer, source.meta.end_token) for source in (first, other))
    return (
        f"documents end with {one} in {first.name} and with {two} in {other.name}; prepare "
        f"one of them again with the other's --end-token"
    )


def require_tokenizer(config: TokenizerConfig, folder: Path, meta: Any) -> None:
    """Raise DataError if the config's tokenizer or end token is not that of the prepared folder with this Meta."""
    if config.path and (wanted := bpe.sha256(bpe.load(Path(config.path)))) != meta.tokenizer_sha256:
        raise DataError(
            f"{folder} was prepared with another tokenizer ({meta.tokenizer_sha256[:12]}) than tokenizer.path = "
            f"{config.path} ({wanted[:12]}); leave tokenizer.path out, or prepare the text again with that tokenizer"
        )
    tokenizer = bpe.load(folder / "tokenizer.json")
    if config.end_token and tokenizer.token_to_id(config.end_token) != meta.end_token:
        raise DataError(
            f"documents in {folder} end with {bpe.shown(tokenizer, meta.end_token)}, but tokenizer.end_token is "
            f"{config.end_token!r}; leave tokenizer.end_token out, or prepare the text again with that --end-token"
        )
