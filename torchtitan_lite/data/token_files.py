"""The format of a prepared folder, its reader and its checks.

    meta.json                       Meta below, written last: a folder without it is incomplete
    tokenizer.json
    train-00000.bin, ...            the tokens of all training documents, uint16 or uint32, in shards of equal length
    train.idx                       the end of each document in the stream, int64
    val-00000.bin, ..., val.idx     the same for validation
    skipped.log                     skipped texts, if any (--on-error skip)
    pairs.json                      only for pairs: their keys, and the prefix of each source

The stream of a split is: end token, document, end token, document, ..., end token. A document's first token is
predicted from the end token before it.
"""

import hashlib
import json
import os
import weakref
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.config.paths import _LONGEST_META
from torchtitan_lite.errors import DataError

FORMAT_VERSION = 2
IN_PLACE = 3  # the same, with Megatron's .bin files in place of ours: megatron/tokens.py
SPLITS = "train", "val"
PAIRS = "pairs.json"  # only of pairs: documents are a source, its target, a source, ...
_SPOTS = 64
_SPOT_BYTES = 4096
HASHED_BYTES = 256 << 20  # larger files are compared by size and 64 spots, except by verify
_BLOCK = 1 << 22  # tokens checked at a time


@dataclass(frozen=True)
class File:
    """The size and hashes of a file."""

    bytes: int
    sha256: str
    spots: str  # a hash of 64 short pieces, checked each time a run starts

    @classmethod
    def of(cls, path: Path) -> "File":
        """Hash a file."""
        with path.open("rb") as stream:
            return cls(path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest(), spots(path))


@dataclass(frozen=True)
class Meta:
    """The content of meta.json."""

    format_version: int
    documents: int
    val_documents: int
    text_bytes: int
    val_text_bytes: int
    train_tokens: int
    val_tokens: int
    unknown_tokens: int  # tokens for text that the vocabulary lacks
    vocab_size: int
    end_token: int
    shard_tokens: int  # in each shard but the last of a split
    tokenizer_sha256: str
    tokens_sha256: str  # a hash of all token files' hashes: the identity of the data
    made_from: str  # a hash of the texts' names, sizes and times and of all options
    files: dict[str, File]
    skipped: dict[str, int]  # the number of skipped documents, lines or files, by reason
    skipped_first: list[str]  # the first of them; all are in skipped.log

    def tokens(self, split: str) -> int:
        """The number of tokens in a split's stream."""
        return self.train_tokens if split == "train" else self.val_tokens

    def n_documents(self, split: str) -> int:
        """The number of documents in a split."""
        return self.val_documents if split == "val" else self.documents - self.val_documents


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The dtype of a token file."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def shard_name(split: str, number: int) -> str:
    """The name of a token file."""
    return f"{split}-{number:05d}.bin"


def shard_lengths(tokens: int, shard_tokens: int) -> list[int]:
    """The number of tokens in each shard of a split."""
    full, rest = divmod(tokens, shard_tokens)
    return [shard_tokens] * full + [rest] * bool(rest)


class TokenFiles:
    """The token stream of one split. It is read, not mapped: a truncated file is then an error, not a SIGBUS."""

    def __init__(self, folder: Path, meta: Meta, split: str) -> None:
        self._dtype = np.dtype(token_dtype(meta.vocab_size))
        self._shard_tokens = meta.shard_tokens
        self._split, self._folder = split, folder
        self._vocab_size = meta.vocab_size
        self._files: dict[int, int] = {}  # descriptors
        self._in_place: Any = None
        if meta.format_version == IN_PLACE:
            from torchtitan_lite.data.megatron.tokens import MegatronTokens

            self._in_place = MegatronTokens(folder, meta, split, token_dtype(meta.vocab_size))

    def read(self, first: int, end: int) -> NDArray[Any]:
        """Tokens first, ..., end - 1 of the stream, (end - first,) uint16 or uint32.

        Raises:
            DataError: a file is unreadable or truncated, or has a token outside the vocabulary.
        """
        if self._in_place is not None:
            return self._in_place.read(first, end)
        number, offset = divmod(first, self._shard_tokens)
        n = min(end - first, self._shard_tokens - offset)
        size = self._dtype.itemsize
        file = self._folder / shard_name(self._split, number)
        try:
            data = os.pread(self._descriptor(number), n * size, offset * size)
        except OSError as error:
            raise DataError(f"{file} can't be read at byte {offset * size:,}: {error.strerror}") from None
        if len(data) != n * size:
            raise DataError(f"{file} ends before token {offset + n:,}: it was truncated after the run started")
        tokens = np.frombuffer(data, self._dtype)
        if n and int(tokens.max()) >= self._vocab_size:
            from torchtitan_lite.data.repair import remedy

            bad = int(np.argmax(tokens >= self._vocab_size))
            raise DataError(
                f"{file} is damaged: token {offset + bad:,} (at byte {(offset + bad) * size:,}) is {int(tokens[bad])}, "
                f"but the vocabulary has {self._vocab_size} entries; {remedy(self._folder)} "
                "(python -m torchtitan_lite.data.prepare --verify FOLDER reads every byte)"
            )
        return tokens if n == end - first else np.concatenate((tokens, self.read(first + n, end)))

    def _descriptor(self, number: int) -> int:
        if number not in self._files:
            path = self._folder / shard_name(self._split, number)
            try:
                self._files[number] = os.open(path, os.O_RDONLY)
                weakref.finalize(self, os.close, self._files[number])
            except OSError as error:
                raise DataError(f"{path} can't be read: {error}") from None
        return self._files[number]


def spots(path: Path) -> str:
    """A hash of the size and of 64 evenly spaced pieces; fast for any size."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        for i in range(_SPOTS):
            digest.update(os.pread(stream.fileno(), _SPOT_BYTES, max(size - _SPOT_BYTES, 0) * i // (_SPOTS - 1)))
    return digest.hexdigest()


def read_meta(folder: Path) -> Meta:
    """Read meta.json, and check the sizes and spots of the files.

    Raises:
        DataError: the folder is damaged or has another format version.
    """
    try:
        meta = _parsed(folder / "meta.json")
        _require_named(meta)
        for name, file in meta.files.items():
            size = (folder / name).stat().st_size
            if size != file.bytes:
                raise ValueError(f"{name} has {size:,} bytes instead of {file.bytes:,}")
            if spots(folder / name) != file.spots:
                raise ValueError(f"{name} has changed since it was made")
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError) as error:
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder of prepared data") from None
        from torchtitan_lite.data.repair import remedy

        raise DataError(f"{folder}: the prepared data is damaged ({error}); {remedy(folder)}") from None
    except OSError as error:
        raise DataError(f"{error.filename or folder} can't be read: {error.strerror}") from None
    return meta


def _parsed(file: Path) -> Meta:
    """Parse meta.json.

    Raises:
        ValueError: it is malformed.
    """
    if not file.is_file():
        raise FileNotFoundError("there is no meta.json" if not file.exists() else "meta.json is not a file")
    if file.stat().st_size > _LONGEST_META:
        raise ValueError("meta.json is too long")
    content = json.loads(file.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("meta.json is not a JSON object")
    if (version := content.get("format_version")) not in (FORMAT_VERSION, IN_PLACE):
        raise ValueError(f"its format is {version}, but this version reads {FORMAT_VERSION} and {IN_PLACE}")
    _require_types(Meta, content, "meta.json")
    for name, described in content["files"].items():
        if not isinstance(described, dict):
            raise ValueError(f"meta.json does not describe {name}")
        _require_types(File, described, f"meta.json, {name}")
    return Meta(**{**content, "files": {name: File(**described) for name, described in content["files"].items()}})


def _require_types(what: type[Meta] | type[File], content: dict[str, Any], place: str) -> None:
    wanted = {field.name: field.type for field in fields(what)}
    if wrong := sorted(wanted.keys() ^ content.keys()):
        raise ValueError(f"{place} {'has no' if wrong[0] in wanted else 'has an unknown'} {wrong[0]}")
    for name, value in content.items():
        kind = get_origin(wanted[name]) or wanted[name]
        if type(value) is not kind or (kind is int and not 0 <= value < 2**62):
            raise ValueError(f"{place}: {name} is {json.dumps(value)[:40]}")


def _require_named(meta: Meta) -> None:
    """Check that meta.json is consistent, and lists exactly the expected files with the expected sizes."""
    if not meta.end_token < meta.vocab_size <= 2**32:
        raise ValueError(f"meta.json: end_token {meta.end_token} is not in a vocabulary of {meta.vocab_size}")
    if not meta.shard_tokens or max(map(meta.tokens, SPLITS)) > meta.shard_tokens * len(meta.files):
        raise ValueError(f"meta.json: shard_tokens is {meta.shard_tokens}, with {len(meta.files)} files")
    if meta.val_documents > meta.documents:
        raise ValueError(f"meta.json: {meta.val_documents} of {meta.documents} documents are for validation")
    itemsize = np.dtype(token_dtype(meta.vocab_size)).itemsize
    wanted: dict[str, int] = {}
    others = {"tokenizer.json", "skipped.log", PAIRS}
    if in_place := meta.format_version == IN_PLACE:
        others |= {"megatron.json", "train.extents", "val.extents", *filter(os.path.isabs, meta.files)}
    for split in SPLITS:
        for number, length in enumerate(() if in_place else shard_lengths(meta.tokens(split), meta.shard_tokens)):
            wanted[shard_name(split, number)] = length * itemsize
        wanted[f"{split}.idx"] = meta.n_documents(split) * 8
    for name, file in meta.files.items():
        if name not in others and wanted.get(name) != file.bytes:
            raise ValueError(f"meta.json contradicts itself about {name}")
    if missing := (wanted.keys() | {"tokenizer.json"}) - meta.files.keys():
        raise ValueError(f"meta.json does not list {', '.join(sorted(missing))}")
