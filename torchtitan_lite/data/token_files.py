"""What a prepared folder says of itself, and whether it is true.

    meta.json                       this file's Meta, written last: a folder without it is no data set
    tokenizer.json
    train-00000.bin, ...            the tokens of all training documents, uint16 or uint32, in shards of equal length
    train.idx                       where each document ends in them, int64
    val-00000.bin, ..., val.idx     the same for validation
    skipped.log                   what was left out, if anything was (--on-error skip)

The stream of a split is: end mark, document, end mark, document, ..., end mark. So each document has a mark before it,
to predict its first token from, and one behind it, to learn where it ends.
"""

import hashlib
import json
import os
import re
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_origin

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.config.paths import _LONGEST_META
from torchtitan_lite.errors import DataError

FORMAT_VERSION = 2
SPLITS = "train", "val"
_SPOTS = 64
_SPOT_BYTES = 4096
_ENDS = 1 << 20  # ends of documents that are looked at together
HASHED_BYTES = 256 << 20  # more than this is compared by its size and 64 spots, where all of it is not asked for
_BLOCK = 1 << 22  # tokens that are looked at at a time
OURS = re.compile(
    r"(train|val)(-\d+\.bin|\.idx)|skipped\.log|(meta|progress|tokenizer)\.json(\.new)?"
    r"|packed-\d+-[0-9a-f]+(\.partial|\.lock)?"
)  # the names in a prepared folder
_PACKED = re.compile(r"(train|val)\.(pieces|rows)|hashes\.json(\.new)?")  # in a packed-* folder


@dataclass(frozen=True)
class File:
    """One file of a prepared folder."""

    bytes: int
    sha256: str
    spots: str  # a hash of 64 short pieces: what a run checks each time it starts

    @classmethod
    def of(cls, path: Path) -> "File":
        """What it is now."""
        with path.open("rb") as stream:
            return cls(path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest(), spots(path))


@dataclass(frozen=True)
class Meta:
    """meta.json."""

    format_version: int
    documents: int
    val_documents: int
    text_bytes: int
    val_text_bytes: int
    train_tokens: int
    val_tokens: int
    unknown_tokens: int  # that stand for something that the vocabulary does not have
    vocab_size: int
    end_token: int
    shard_tokens: int  # in each shard but the last of a split
    tokenizer_sha256: str
    tokens_sha256: str  # of the hashes of all token files: two data sets with this in common are the same data
    made_from: str  # a hash of the texts' names, sizes and times and of all options
    files: dict[str, File]
    skipped: dict[str, int]  # how many documents, lines or files were left out, by reason
    skipped_first: list[str]  # the first of them; all are in skipped.log

    def tokens(self, split: str) -> int:
        """The length of a split's stream."""
        return self.train_tokens if split == "train" else self.val_tokens

    def n_documents(self, split: str) -> int:
        """The documents of a split."""
        return self.val_documents if split == "val" else self.documents - self.val_documents


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The dtype of a token file."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def shard_name(split: str, number: int) -> str:
    """The name of a token file."""
    return f"{split}-{number:05d}.bin"


def shard_lengths(tokens: int, shard_tokens: int) -> list[int]:
    """How many tokens each shard of a split holds."""
    full, rest = divmod(tokens, shard_tokens)
    return [shard_tokens] * full + [rest] * bool(rest)


class TokenFiles:
    """The token stream of one split. It is read, not mapped: a file that was cut is then an error, and no crash."""

    def __init__(self, folder: Path, meta: Meta, split: str) -> None:
        self._dtype = np.dtype(token_dtype(meta.vocab_size))
        self._shard_tokens = meta.shard_tokens
        self._split, self._folder = split, folder
        self._vocab_size = meta.vocab_size
        self._files: dict[int, int] = {}  # descriptors

    def read(self, first: int, end: int) -> NDArray[Any]:
        """Tokens first, ..., end - 1 of the stream, (end - first,) uint16 or uint32.

        Raises:
            DataError: a file can't be read, has fewer than it should, or holds a token that the vocabulary does not.
        """
        number, offset = divmod(first, self._shard_tokens)
        n = min(end - first, self._shard_tokens - offset)
        size = self._dtype.itemsize
        file = self._folder / shard_name(self._split, number)
        try:
            data = os.pread(self._descriptor(number), n * size, offset * size)
        except OSError as error:
            raise DataError(f"{file} can't be read at byte {offset * size:,}: {error.strerror}") from None
        if len(data) != n * size:
            raise DataError(f"{file} ends before token {offset + n:,}: it was cut while it was being read")
        tokens = np.frombuffer(data, self._dtype)
        if n and int(tokens.max()) >= self._vocab_size:
            bad = int(np.argmax(tokens >= self._vocab_size))
            raise DataError(
                f"{file} is damaged: token {offset + bad:,} (at byte {(offset + bad) * size:,}) is {int(tokens[bad])}, "
                f"and the vocabulary has {self._vocab_size} entries; {remedy(self._folder)} "
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


def document_ends(folder: Path, meta: Meta, split: str) -> NDArray[np.int64]:
    """Where each document of a split ends in its stream, mapped; each end was looked at.

    Raises:
        DataError: the ends do not divide the stream into documents.
    """
    file = folder / f"{split}.idx"
    try:
        ends = np.memmap(file, dtype=np.int64, mode="r")
    except (OSError, ValueError) as error:  # ValueError: it is empty, or holds half a number
        raise DataError(f"{file} can't be read: {error}") from None
    before, n_tokens = 1, meta.tokens(split)  # a document has an end mark at least
    for first in range(0, len(ends), _ENDS):
        some = ends[first : first + _ENDS]
        good = np.diff(some, prepend=before) > 0
        good &= some <= n_tokens
        if not good.all():
            bad = first + int(np.argmin(good))
            raise DataError(_wrong_end(file, bad, int(ends[bad]), int(ends[bad - 1]) if bad else 1, n_tokens))
        before = some[-1]
    if ends[-1] != n_tokens:
        raise DataError(_wrong_end(file, len(ends) - 1, int(ends[-1]), n_tokens - 1, n_tokens))
    return ends


def _wrong_end(file: Path, number: int, end: int, before: int, n_tokens: int) -> str:
    return (
        f"{file} is damaged: document {number:,} (at byte {8 * number:,}) ends at token {end:,}, and should end after "
        f"{before:,} and at most at {n_tokens:,}; {remedy(file.parent)}"
    )


def foreign(folder: Path) -> list[str]:
    """What a folder holds that is no part of prepared data, sorted."""
    names = []
    for entry in os.scandir(folder):
        if not OURS.fullmatch(entry.name):
            names.append(entry.name)
        elif entry.is_dir():  # of packing.py
            names += [f"{entry.name}/{name}" for name in os.listdir(entry) if not _PACKED.fullmatch(name)]
    return sorted(names)


def remedy(folder: Path) -> str:
    """What to do about a damaged folder; never to delete what is not ours."""
    try:
        others = foreign(folder)
    except OSError as error:
        return f"it can't be listed: {error.strerror}"
    if others:
        return f"prepare the text again into another folder; keep this one, which also holds {others[0]}"
    return "delete this folder, and prepare it again (what train.py has prepared itself, it makes again)"


def spots(path: Path) -> str:
    """A hash of the size and of 64 evenly spread pieces: quick for any size, and other text does not pass for this."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        for i in range(_SPOTS):
            digest.update(os.pread(stream.fileno(), _SPOT_BYTES, max(size - _SPOT_BYTES, 0) * i // (_SPOTS - 1)))
    return digest.hexdigest()


def read_meta(folder: Path) -> Meta:
    """The meta.json of a prepared folder, whose files have the sizes and the spots that it says.

    Raises:
        DataError: the folder is damaged, or of another version.
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
        raise DataError(f"{folder}: the prepared data is damaged ({error}); {remedy(folder)}") from None
    except OSError as error:
        raise DataError(f"{error.filename or folder} can't be read: {error.strerror}") from None
    return meta


def _parsed(file: Path) -> Meta:
    """A meta.json whose values have the right types.

    Raises:
        ValueError: it is something else.
    """
    if not file.is_file():
        raise FileNotFoundError("there is no meta.json" if not file.exists() else "meta.json is not a file")
    if file.stat().st_size > _LONGEST_META:
        raise ValueError("meta.json is too long")
    content = json.loads(file.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("meta.json holds no object")
    if content.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"its format is {content.get('format_version')}, and this version reads {FORMAT_VERSION}")
    _require_types(Meta, content, "meta.json")
    for name, described in content["files"].items():
        if not isinstance(described, dict):
            raise ValueError(f"meta.json says nothing of {name}")
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
    """The files of the right sizes are all there: none is missing from meta.json, and none is elsewhere."""
    if not meta.end_token < meta.vocab_size <= 2**32:
        raise ValueError(f"meta.json: end_token {meta.end_token} is not in a vocabulary of {meta.vocab_size}")
    if not meta.shard_tokens or max(map(meta.tokens, SPLITS)) > meta.shard_tokens * len(meta.files):
        raise ValueError(f"meta.json: shard_tokens is {meta.shard_tokens}, with {len(meta.files)} files")
    if meta.val_documents > meta.documents:
        raise ValueError(f"meta.json: {meta.val_documents} of {meta.documents} documents are for validation")
    itemsize = np.dtype(token_dtype(meta.vocab_size)).itemsize
    wanted: dict[str, int] = {}
    for split in SPLITS:
        for number, length in enumerate(shard_lengths(meta.tokens(split), meta.shard_tokens)):
            wanted[shard_name(split, number)] = length * itemsize
        wanted[f"{split}.idx"] = meta.n_documents(split) * 8
    others = {"tokenizer.json", "skipped.log"}
    for name, file in meta.files.items():
        if name not in others and wanted.get(name) != file.bytes:
            raise ValueError(f"meta.json contradicts itself about {name}")
    if missing := (wanted.keys() | {"tokenizer.json"}) - meta.files.keys():
        raise ValueError(f"meta.json does not have {', '.join(sorted(missing))}")


def all_files(folder: Path, names: list[str]) -> dict[str, File]:
    """What these files are now, hashed on all cores."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: File.of(folder / name), names), strict=True))


def identity(files: dict[str, File]) -> str:
    """`tokens_sha256` of these files."""
    shards = sorted((name, file.sha256) for name, file in files.items() if name.endswith(".bin"))
    return hashlib.sha256(json.dumps(shards).encode()).hexdigest()


def verify(folder: Path) -> list[str]:
    """Everything that is wrong with a prepared folder, a line each: every byte is read.

    Raises:
        DataError: it can't be read as one at all.
    """
    meta = read_meta(folder)
    now = all_files(folder, list(meta.files))
    wrong = [f"{name}: its SHA-256 is not the one in meta.json" for name in now if now[name] != meta.files[name]]
    if identity(now) != meta.tokens_sha256:
        wrong.append("meta.json: tokens_sha256 is not that of the token files")
    return wrong + wrong_documents(folder, meta)


def wrong_documents(folder: Path, meta: Meta) -> list[str]:
    """What is wrong with the division into documents, whatever the hashes say."""
    return [line for split in SPLITS for line in _wrong_documents(folder, meta, split)]


def _wrong_documents(folder: Path, meta: Meta, split: str) -> Iterator[str]:
    """Ids that the vocabulary does not have; documents that do not end with the end mark, or have others inside."""
    dtype = np.dtype(token_dtype(meta.vocab_size))
    ends = np.memmap(folder / f"{split}.idx", dtype=np.int64, mode="r") if meta.n_documents(split) else np.empty(0, int)
    if not len(ends) or ends[-1] != meta.tokens(split) or ends[0] < 1 or (np.diff(ends) <= 0).any():
        yield f"{split}.idx: does not divide the {meta.tokens(split):,} tokens into documents"
        return
    marks = 0
    for number in range(len(shard_lengths(meta.tokens(split), meta.shard_tokens))):
        tokens = np.memmap(folder / shard_name(split, number), dtype=dtype, mode="r")
        if int(tokens.max()) >= meta.vocab_size:
            yield f"{shard_name(split, number)}: a token is not in the vocabulary of {meta.vocab_size}"
        first = number * meta.shard_tokens
        low, high = np.searchsorted(ends, [first + 1, first + len(tokens) + 1])
        if (tokens[ends[low:high] - 1 - first] != meta.end_token).any():
            yield f"{shard_name(split, number)}: a document does not end with the end mark"
        marks += sum(int((tokens[i : i + _BLOCK] == meta.end_token).sum()) for i in range(0, len(tokens), _BLOCK))
    if marks != meta.n_documents(split) + 1:
        yield (
            f"{split}: {marks:,} end marks (token {meta.end_token}) for {meta.n_documents(split):,} documents, where "
            f"{meta.n_documents(split) + 1:,} should be: text was taken for the end mark, or a mark is missing"
        )
