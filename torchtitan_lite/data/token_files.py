"""The format of a prepared folder, its reader and its checks.

    meta.json                       Meta below, written last: a folder without it is incomplete
    tokenizer.json
    train.bin, val.bin              the tokens of all documents of a split, uint16 or uint32
    train.idx, val.idx              the end of each document in the stream, int64
    train.origins, val.origins      for each document: number of the file << 36 | line or row, int64 (if known)
    origins.json                    the files of the text, each with the unit of its places (if known)
    skipped.log                     skipped texts, if any (--on-error skip)
    pairs.json                      only for pairs: their keys, and the prefix of each source

The stream of a split is: end token, document, end token, document, ..., end token. A document's first token is
predicted from the end token before it.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.errors import DataError, shortened

FORMAT_VERSION = 5
SPLITS = "train", "val"
PAIRS = "pairs.json"  # only of pairs: documents are a source, its target, a source, ...
ORIGINS = "origins.json"
PLACE_BITS = 36
_SPOTS = 64
_SPOT_BYTES = 4096
HASHED_BYTES = 256 << 20  # larger files are compared by size and 64 spots, except by verify
_ENDS = 1 << 20  # document ends checked at a time
PREPARE_AGAIN = (
    "prepare the text again into another folder (train.py does so itself if you delete a folder in its cache)"
)


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
    tokenizer_sha256: str
    tokens_sha256: str  # a hash of all token files' hashes: the identity of the data
    made_from: str  # a hash of the texts' names, sizes and times and of all options
    files: dict[str, File]
    skipped: dict[str, int]  # the number of skipped texts and files by reason; skipped.log lists them

    def tokens(self, split: str) -> int:
        """The number of tokens in a split's stream."""
        return self.train_tokens if split == "train" else self.val_tokens

    def n_documents(self, split: str) -> int:
        """The number of documents in a split."""
        return self.val_documents if split == "val" else self.documents - self.val_documents


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def hashed(folder: Path, names: Iterable[str]) -> dict[str, File]:
    """Hash these files on all cores."""
    listed = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(listed, pool.map(lambda name: File.of(folder / name), listed), strict=True))


def identity(files: dict[str, File]) -> str:
    """`tokens_sha256` of these files."""
    tokens = sorted((name, file.sha256) for name, file in files.items() if name.endswith(".bin"))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


class TokenFiles:
    """The token stream of one split. It is read, not mapped: a truncated file is then an error, not a SIGBUS."""

    def __init__(self, folder: Path, meta: Meta, split: str) -> None:
        """
        Raises:
            DataError: the file can't be opened.
        """
        self.path, self._vocab_size = folder / f"{split}.bin", meta.vocab_size
        self._dtype = np.dtype(token_dtype(meta.vocab_size))
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{self.path} can't be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, first: int, end: int) -> NDArray[Any]:
        """Tokens first, ..., end - 1 of the stream, (end - first,) uint16 or uint32.

        Raises:
            DataError: the file is unreadable or truncated, or has a token outside the vocabulary.
        """
        size = self._dtype.itemsize
        try:
            data = os.pread(self._descriptor, (end - first) * size, first * size)
        except OSError as error:
            raise DataError(f"{self.path} can't be read at byte {first * size:,}: {error.strerror}") from None
        if len(data) != (end - first) * size:
            raise DataError(f"{self.path} ends before token {end:,}: it was truncated after the run started")
        tokens = np.frombuffer(data, self._dtype)
        if len(tokens) and int(tokens.max()) >= self._vocab_size:
            bad = int(np.argmax(tokens >= self._vocab_size))
            raise DataError(
                f"{self.path} is damaged: token {first + bad:,} (at byte {(first + bad) * size:,}) is "
                f"{int(tokens[bad])}, but the vocabulary has {self._vocab_size} entries; {PREPARE_AGAIN} "
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
                f"{int(block[bad]):,}, but should end after {least:,} and at most at {n_tokens:,}; {PREPARE_AGAIN}"
            )
        before = int(block[-1])
    return ends


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
        raise DataError(f"{folder}: the prepared data is damaged ({error}); {PREPARE_AGAIN}") from None
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
    if meta.val_documents > meta.documents:
        raise ValueError(f"meta.json: {meta.val_documents} of {meta.documents} documents are for validation")
    itemsize = np.dtype(token_dtype(meta.vocab_size)).itemsize
    sizes: dict[str, int] = {}  # in bytes
    for split in SPLITS:
        sizes |= {f"{split}.bin": meta.tokens(split) * itemsize, f"{split}.idx": meta.n_documents(split) * 8}
        sizes[f"{split}.origins"] = meta.n_documents(split) * 8
    for name, file in meta.files.items():
        if sizes.get(name, file.bytes) != file.bytes:
            raise ValueError(f"meta.json contradicts itself about {name}")
    required = {"tokenizer.json", *(f"{split}.{what}" for split in SPLITS for what in ("bin", "idx"))}
    if ORIGINS in meta.files:
        required |= sizes.keys()
    if missing := required - meta.files.keys():
        raise ValueError(f"meta.json does not list {', '.join(sorted(missing))}")
