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
import re
import weakref
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.config.paths import _LONGEST_META
from torchtitan_lite.errors import DataError, shortened

FORMAT_VERSION = 4
SPLITS = "train", "val"
PAIRS = "pairs.json"  # only of pairs: documents are a source, its target, a source, ...
_SPOTS = 64
_SPOT_BYTES = 4096
HASHED_BYTES = 256 << 20  # larger files are compared by size and 64 spots, except by verify
_ENDS = 1 << 20  # document ends checked at a time
_OURS = re.compile(
    r"(train|val)(-\d+\.bin|\.(idx|origins))|skipped\.log"
    r"|(meta|progress|tokenizer|pairs|origins)\.json(\.[0-9a-f]{8}\.new)?"
    r"|packed-\d+-[0-9a-f]+(\.partial|\.lock)?"
)  # the names in a prepared folder
_PACKED = re.compile(r"(train|val)\.(pieces|rows)|hashes\.json(\.[0-9a-f]{8}\.new)?")  # in a packed-* folder


@dataclass(frozen=True)
class File:
    """The size and hashes of a file."""

    bytes: int
    sha256: str
    spots: str  # a hash of 64 short pieces, checked each time a run starts

    @classmethod
    def of(cls, path: Path) -> "File":
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
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def shard_lengths(tokens: int, shard_tokens: int) -> list[int]:
    """The number of tokens in each shard of a split."""
    full, rest = divmod(tokens, shard_tokens)
    return [shard_tokens] * full + [rest] * bool(rest)


class TokenFile:
    """A file of tokens. It is read, not mapped: a truncated file is then an error, not a SIGBUS."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self._dtype = path, dtype
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, first: int, n: int) -> NDArray[Any]:
        """Tokens first, ..., first + n - 1 of the file, (n,).

        Raises:
            DataError: the file is unreadable or truncated.
        """
        size = self._dtype.itemsize
        try:
            data = os.pread(self._descriptor, n * size, first * size)
        except OSError as error:
            raise DataError(f"{self.path} can't be read at byte {first * size:,}: {error.strerror}") from None
        if len(data) != n * size:
            raise DataError(f"{self.path} ends before token {first + n:,}: it was truncated after the run started")
        return np.frombuffer(data, self._dtype)


class TokenFiles:
    """The token stream of one split, in its shards."""

    def __init__(self, folder: Path, meta: Meta, split: str) -> None:
        self._folder, self._split, self._meta = folder, split, meta
        self._dtype = np.dtype(token_dtype(meta.vocab_size))
        self._shards: dict[int, TokenFile] = {}  # those that were opened

    def read(self, first: int, end: int) -> NDArray[Any]:
        """Tokens first, ..., end - 1 of the stream, (end - first,) uint16 or uint32.

        Raises:
            DataError: a file is unreadable or truncated, or has a token outside the vocabulary.
        """
        size = self._meta.shard_tokens
        number, at = divmod(first, size)
        if at + end - first <= size:  # the usual case: one shard has all of it
            return self._read_shard(number, at, end - first)
        parts = [self._read_shard(number, at, size - at)]
        for begin in range((number + 1) * size, end, size):
            parts.append(self._read_shard(begin // size, 0, min(end - begin, size)))
        return np.concatenate(parts)

    def _read_shard(self, number: int, first: int, n: int) -> NDArray[Any]:
        if number not in self._shards:
            self._shards[number] = TokenFile(self._folder / shard_name(self._split, number), self._dtype)
        shard, vocab_size = self._shards[number], self._meta.vocab_size
        tokens = shard.read(first, n)
        if n and int(tokens.max()) >= vocab_size:
            bad = int(np.argmax(tokens >= vocab_size))
            raise DataError(
                f"{shard.path} is damaged: token {first + bad:,} (at byte {(first + bad) * self._dtype.itemsize:,}) is "
                f"{int(tokens[bad])}, but the vocabulary has {vocab_size} entries; {remedy(self._folder)} "
                "(python -m torchtitan_lite.data.prepare --verify FOLDER reads every byte)"
            )
        return tokens


def document_ends(folder: Path, meta: Meta, split: str) -> NDArray[np.int64]:
    """The end of each document in a split's stream, memory-mapped and checked.

    Raises:
        DataError: the ends are not increasing, or do not match the stream's length.
    """
    file = folder / f"{split}.idx"
    try:
        ends = np.memmap(file, dtype=np.int64, mode="r")
    except (OSError, ValueError) as error:  # ValueError: empty, or not a multiple of 8 bytes
        raise DataError(f"{file} can't be read: {error}") from None
    n_tokens, before = meta.tokens(split), 1  # the stream begins with an end token
    for first in range(0, len(ends), _ENDS):
        block = ends[first : first + _ENDS]
        good = (np.diff(block, prepend=before) > 0) & (block <= n_tokens)
        if last := first + len(block) == len(ends):
            good[-1] &= block[-1] == n_tokens
        if not good.all():
            bad = int(np.argmin(good))
            least = n_tokens - 1 if last and bad == len(block) - 1 else int(block[bad - 1]) if bad else before
            raise DataError(
                f"{file} is damaged: document {first + bad:,} (at byte {8 * (first + bad):,}) ends at token "
                f"{int(block[bad]):,}, but should end after {least:,} and at most at {n_tokens:,}; {remedy(folder)}"
            )
        before = int(block[-1])
    return ends


def foreign(folder: Path) -> list[str]:
    """The entries of a folder that are not part of prepared data, sorted."""
    names = []
    for entry in os.scandir(folder):
        if not _OURS.fullmatch(entry.name):
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
        _require_consistent(meta)
        for name, file in meta.files.items():
            size = (folder / name).stat().st_size
            if size != file.bytes:
                raise ValueError(f"{name} has {size:,} bytes instead of {file.bytes:,}")
            if spots(folder / name) != file.spots:
                raise ValueError(f"{name} has changed since it was made")
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError) as error:
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder of prepared data") from None
        raise DataError(f"{folder}: the prepared data is damaged ({error}); {remedy(folder)}") from None
    except OSError as error:
        raise DataError(f"{error.filename or folder} can't be read: {error.strerror}") from None
    return meta


def _parsed(file: Path) -> Meta:
    """Parse meta.json.

    Raises:
        ValueError: it is malformed.
        DataError: it has another format version.
    """
    if not file.is_file():
        raise FileNotFoundError("there is no meta.json" if not file.exists() else "meta.json is not a file")
    if file.stat().st_size > _LONGEST_META:
        raise ValueError("meta.json is too long")
    content = json.loads(file.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("meta.json is not a JSON object")
    if (version := content.get("format_version")) != FORMAT_VERSION:
        raise DataError(
            f"{file.parent} has format {shortened(version)}, but this version reads {FORMAT_VERSION}: prepare the text "
            "again into another folder"
        )
    _require_fields(Meta, content, "meta.json")
    for name, described in content["files"].items():
        if not isinstance(described, dict):
            raise ValueError(f"meta.json does not describe {name}")
        _require_fields(File, described, f"meta.json, {name}")
    return Meta(**{**content, "files": {name: File(**described) for name, described in content["files"].items()}})


def _require_fields(record: type[Meta] | type[File], content: dict[str, Any], place: str) -> None:
    types = {field.name: field.type for field in fields(record)}
    if wrong := sorted(types.keys() ^ content.keys()):
        raise ValueError(f"{place} {'has no' if wrong[0] in types else 'has an unknown'} {wrong[0]}")
    for name, value in content.items():
        expected = get_origin(types[name]) or types[name]
        if type(value) is not expected or (expected is int and not 0 <= value < 2**62):
            raise ValueError(f"{place}: {name} is {json.dumps(value)[:40]}")


def _require_consistent(meta: Meta) -> None:
    """Check that meta.json is consistent, and lists exactly the expected files with the expected sizes."""
    if not meta.end_token < meta.vocab_size <= 2**32:
        raise ValueError(f"meta.json: end_token {meta.end_token} is not in a vocabulary of {meta.vocab_size}")
    if not meta.shard_tokens or max(map(meta.tokens, SPLITS)) > meta.shard_tokens * len(meta.files):
        raise ValueError(f"meta.json: shard_tokens is {meta.shard_tokens}, with {len(meta.files)} files")
    if meta.val_documents > meta.documents:
        raise ValueError(f"meta.json: {meta.val_documents} of {meta.documents} documents are for validation")
    itemsize = np.dtype(token_dtype(meta.vocab_size)).itemsize
    sizes: dict[str, int] = {}  # in bytes
    others = {"tokenizer.json", "skipped.log", PAIRS}
    for split in SPLITS:
        for number, length in enumerate(shard_lengths(meta.tokens(split), meta.shard_tokens)):
            sizes[shard_name(split, number)] = length * itemsize
        sizes[f"{split}.idx"] = meta.n_documents(split) * 8
    for name, file in meta.files.items():
        if name not in others and sizes.get(name) != file.bytes:
            raise ValueError(f"meta.json contradicts itself about {name}")
    if missing := (sizes.keys() | {"tokenizer.json"}) - meta.files.keys():
        raise ValueError(f"meta.json does not list {', '.join(sorted(missing))}")
