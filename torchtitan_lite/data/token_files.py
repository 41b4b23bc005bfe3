"""The format of a prepared folder, its reader and its checks.

    meta.json                       Meta below, written last: a folder without it is incomplete
    tokenizer.json
    train.bin, val.bin              the tokens of all documents of a split, uint16 or uint32
    train.idx, val.idx              the end of each document in the stream, int64
    train.origins, val.origins      for each document: file number << 36 | line or row, int64 (if known)
    origins.json                    the files of the text, each with "line" or "row" (if known)
    skipped.log                     skipped texts, if any (--on-error skip)
    pairs.json                      only for pairs: their keys, and the prefix of the sources

The stream of a split is: end token, document, end token, document, ..., end token. A document's first token is
predicted from the end token before it. With a begin token, it is: begin token, document, end token, begin token,
document, end token, ..., begin token. A document's first token is predicted from the begin token, and both of the
tokens after a document belong to it.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from torchtitan_lite.errors import DataError
from torchtitan_lite.files import naming

FORMAT_VERSION: Final = 6
SPLITS = "train", "val"
PAIRS = "pairs.json"  # only for pairs: documents are a source, its target, a source, ...
ORIGINS = "origins.json"
PLACE_BITS = 36
_SPOTS = 64
_SPOT_BYTES = 4096
_STRICT = ConfigDict(strict=True, extra="forbid")
PREPARE_AGAIN = (
    "prepare the text again into another folder (train.py does so itself if you delete a folder in its cache)"
)


@dataclass(frozen=True, config=_STRICT)
class File:
    """The size and hashes of a file."""

    bytes: NonNegativeInt
    sha256: str
    spots: str  # a hash of 64 short pieces, checked at each start of a run

    @classmethod
    def describe(cls, path: Path) -> "File":
        with path.open("rb") as stream:
            return cls(path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest(), spots(path))


@dataclass(frozen=True, config=_STRICT)
class Meta:
    """The content of meta.json."""

    format_version: Literal[6]
    documents: NonNegativeInt
    val_documents: NonNegativeInt
    text_bytes: NonNegativeInt
    val_text_bytes: NonNegativeInt
    train_tokens: NonNegativeInt
    val_tokens: NonNegativeInt
    unknown_tokens: NonNegativeInt  # tokens for text that the vocabulary lacks
    vocab_size: NonNegativeInt
    end_token: NonNegativeInt
    tokenizer_sha256: str
    tokens_sha256: str  # a hash of all token files' hashes; compared on resume
    made_from: str  # a hash of all options and of the texts' names, sizes and times
    files: dict[str, File]
    skipped: dict[str, int]  # number of skipped texts and files by reason; skipped.log lists them
    begin_token: NonNegativeInt | None = None  # None: the end token before a document begins it

    @property
    def marks(self) -> tuple[int, ...]:
        """The tokens between two documents: the end token, and the begin token if there is one. The last one begins a
        document: its first token is predicted from it."""
        return (self.end_token,) if self.begin_token is None else (self.end_token, self.begin_token)

    def tokens(self, split: str) -> int:
        """Return the number of tokens in a split's stream."""
        return self.train_tokens if split == "train" else self.val_tokens


FILES = TypeAdapter(dict[str, File])
_META = TypeAdapter(Meta)


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def hashed(folder: Path, names: Sequence[str]) -> dict[str, File]:
    """Hash these files on all cores."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: File.describe(folder / name), names), strict=True))


def tokens_hash(files: dict[str, File]) -> str:
    """Return the `tokens_sha256` of these files."""
    tokens = sorted((name, file.sha256) for name, file in files.items() if name.endswith(".bin"))
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def spots(path: Path) -> str:
    """Return a hash of the size and 64 evenly spaced pieces; fast for any size."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        for i in range(_SPOTS):
            digest.update(os.pread(stream.fileno(), _SPOT_BYTES, max(size - _SPOT_BYTES, 0) * i // (_SPOTS - 1)))
    return digest.hexdigest()


def changed(folder: Path, files: dict[str, File], *, in_full: bool = False) -> list[str]:
    """Return a message for each file that differs from the recorded size and spots, or `in_full` from every byte."""

    def problem(name: str) -> str:
        path, made = folder / name, files[name]
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != made.bytes:
            return f"{name} has {size:,} bytes instead of {made.bytes:,}"
        same = File.describe(path) == made if in_full else spots(path) == made.spots
        return "" if same else f"{name} has changed since it was made"

    with ThreadPoolExecutor() as pool:
        return [found for found in pool.map(problem, files) if found]


def read_meta(folder: Path) -> Meta:
    """Read meta.json, and check the files' sizes and spots.

    Raises:
        DataError: the folder is damaged or has a different format version.
        OSError: the system can't read it.
    """
    try:
        meta = _META.validate_json((folder / "meta.json").read_bytes())
        problems = changed(folder, meta.files)
    except ValidationError as error:
        first = error.errors()[0]
        problems = [": ".join(["meta.json", *map(str, first["loc"]), first["msg"]])]
    except (FileNotFoundError, NotADirectoryError) as error:
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder of prepared data") from None
        problems = [str(error)]
    if problems:
        raise DataError(f"{folder}: the prepared data is damaged ({problems[0]}); {PREPARE_AGAIN}")
    return meta


class TokenFiles:
    """The token stream of one split. Read, not mapped: a truncated file raises an error instead of SIGBUS."""

    def __init__(self, folder: Path, meta: Meta, split: str) -> None:
        self.path, self._vocab_size = folder / f"{split}.bin", meta.vocab_size
        self._dtype = np.dtype(token_dtype(meta.vocab_size))
        self._descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, first: int, end: int) -> NDArray[Any]:
        """Return tokens first, ..., end - 1 of the stream, (end - first,) uint16 or uint32.

        Raises:
            DataError: the file is truncated, or has a token outside the vocabulary.
            OSError: the system can't read it.
        """
        size = self._dtype.itemsize
        with naming(self.path):
            data = os.pread(self._descriptor, (end - first) * size, first * size)
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
    """Return the end of each document in a split's stream, memory-mapped.

    Raises:
        DataError: the ends do not increase from the first token to the stream's length.
    """
    ends = np.memmap(folder / f"{split}.idx", dtype=np.int64, mode="r")
    if ends[0] <= 1 or ends[-1] != meta.tokens(split) or (ends[1:] <= ends[:-1]).any():
        raise DataError(
            f"{folder / f'{split}.idx'} is damaged: the ends of its documents do not increase to "
            f"{meta.tokens(split):,}; {PREPARE_AGAIN}"
        )
    return ends


def documents(folder: Path, meta: Meta, split: str, step: int = 1, most: int | None = None) -> Iterator[list[int]]:
    """Yield the tokens of every `step`-th document of a split without its marks, at most the first `most`."""
    stream, ends = TokenFiles(folder, meta, split), document_ends(folder, meta, split)
    for i in range(0, len(ends), step):
        first, end = int(ends[i - 1]) if i else 1, int(ends[i]) - len(meta.marks)
        yield stream.read(first, end if most is None else min(end, first + most)).tolist()
