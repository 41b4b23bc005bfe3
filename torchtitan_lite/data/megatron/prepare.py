"""Makes a prepared folder of Megatron's files, whose tokens stay where they are.

One pass reads all tokens, to check them and to decode each document: as for text, the hash of a document's text decides
whether it is held out. A document ends with its end token in the file (preprocess_data.py --append-eod), or at its end.
Where a file has end tokens within a document, it is cut there. Empty documents are left out.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tqdm import tqdm

from torchtitan_lite.config import paths
from torchtitan_lite.data import token_files as metas
from torchtitan_lite.data import tokenizer as bpe
from torchtitan_lite.data.megatron.index_file import Index, prefix_of, read_index
from torchtitan_lite.data.megatron.tokens import SOURCES, BinFile
from torchtitan_lite.data.prepare import content, literal, plan, summary
from torchtitan_lite.data.prepare.encode import partial_folder
from torchtitan_lite.data.repair import foreign
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import sync_folder, write_durably
from torchtitan_lite.terminal import counted

_TOGETHER = 256  # documents decoded at a time
_BLOCK = 1 << 24  # tokens read at a time
_BUFFERED = 1 << 16  # numbers of a file that are written at a time
_COLUMNS = "position", "n", "file", "at"


@dataclass(frozen=True)
class Document:
    """A document of a .bin file."""

    tokens: NDArray[Any]  # without its end token
    extents: list[tuple[int, int]]  # (first token in the file, number of tokens), with its end token if it has one
    has_end: bool


@dataclass(frozen=True)
class Settings:
    """What the result depends on, besides the files."""

    tokenizer: Tokenizer
    vocab_size: int
    end: int
    unknown: int
    val_fraction: float


def settings(path: Path, end_token: str, val_fraction: float) -> Settings:
    """Load the tokenizer with which the files were made. Raises DataError: it is none, or has no such end token."""
    given = bpe.load(path)
    end = bpe.end_token(given, end_token)
    tokenizer = literal.literal(given.to_str(pretty=True))
    unknown = literal.unknown(tokenizer)
    return Settings(
        tokenizer, bpe.size(tokenizer), end, -1 if unknown in (None, end) else int(unknown or 0), val_fraction
    )


def prepare(prefixes: Sequence[Path], made_with: Settings, out: Path) -> None:
    """Make the folder `out`, unless it has been made of the same files.

    Raises:
        DataError: a file is missing or damaged, does not suit the tokenizer, or has too few documents; or `out` exists.
    """
    indices = [read_index(prefix_of(paths.expand(prefix)).absolute()) for prefix in prefixes]
    if len({index.bin for index in indices}) < len(indices):
        raise DataError("--from-megatron names the same files twice; data.sources gives a text more weight")
    before = _made_from(indices, made_with)
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = out.with_name(f".{out.name}.lock")
    try:
        with FileLock(lock, blocking=False), contextlib.ExitStack() as after:
            after.callback(lock.unlink, missing_ok=True)
            if not out.exists():
                _make(indices, made_with, out, before)
            elif not paths.is_prepared(out) or metas.read_meta(out).made_from != before:
                raise DataError(f"{out} exists, and was made from other files or options; choose another --out")
    except Timeout:
        raise DataError(f"{out} is being prepared by another process") from None
    print(summary.report(out, made_with.tokenizer))


def _made_from(indices: list[Index], made_with: Settings) -> str:
    files = [file for index in indices for file in (index.bin, index.bin.with_suffix(".idx"))]
    stats = [(str(file), (info := file.stat()).st_size, info.st_mtime_ns) for file in files]
    decides = ["megatron", stats, bpe.sha256(made_with.tokenizer), made_with.end, made_with.val_fraction]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def _make(indices: list[Index], made_with: Settings, out: Path, made_from: str) -> None:
    partial = partial_folder(out)
    below = int(made_with.val_fraction * plan.HASH_RANGE)
    lowest, splits = _write(indices, made_with, partial, below)
    if (n := sum(split.documents for split in splits)) < 2:
        raise DataError(
            f"the files have {counted(n, 'document')} with text; at least 2 are needed, to train and to validate"
        )
    if lowest >= below:  # as for text: at least one document is held out
        _, splits = _write(indices, made_with, partial, lowest + 1)
    if not splits[0].documents:
        raise DataError("all documents were held out; use more of them, or a smaller --val-fraction")
    if _made_from(indices, made_with) != made_from:
        raise DataError(content.CHANGED)
    _finish(indices, made_with, partial, splits, made_from)
    partial.rename(out)
    sync_folder(out.parent)
    if n != (theirs := sum(index.n_documents for index in indices)):
        print(f"data    {theirs:,} documents in the files; cut at end tokens, and without empty ones, {n:,}")


# --- reading ----------------------------------------------------------------------------------------------------


def documents(index: Index, made_with: Settings) -> Iterator[Document]:
    """The documents of a .bin file, without empty ones, each with at most one end token: its last."""
    file = BinFile(index.bin, index.dtype)
    for number in range(index.n_documents):
        parts: list[NDArray[Any]] = []
        extents: list[tuple[int, int]] = []
        for first, n in _blocks(index.extents(number)):
            tokens = file.read(first, n, made_with.vocab_size)
            begin = 0
            for end in (*np.flatnonzero(tokens == made_with.end).tolist(), n):
                has_end = end < n
                if end > begin:
                    parts.append(tokens[begin:end])
                if end + has_end > begin:
                    extents.append((first + begin, end + has_end - begin))
                begin = end + 1
                if has_end:
                    if parts:
                        yield Document(_joined(parts), extents, True)
                    parts, extents = [], []
        if parts:
            yield Document(_joined(parts), extents, False)


def _blocks(extents: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The extents in blocks: a file may have all of its text in one document, cut by end tokens."""
    for first, n in extents:
        for at in range(0, n, _BLOCK):
            yield first + at, min(_BLOCK, n - at)


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _decoded(some: list[Document], tokenizer: Tokenizer) -> list[bytes]:
    try:
        texts = tokenizer.decode_batch([document.tokens.tolist() for document in some], skip_special_tokens=False)
    except BaseException as error:  # the library's panics are no Exception
        raise DataError(f"the tokenizer can't decode the tokens: {bpe.reason(error)}") from None
    return [text.encode() for text in texts]


# --- writing ----------------------------------------------------------------------------------------------------


class _Split:
    """The files of one split."""

    def __init__(self, folder: Path, name: str) -> None:
        self._files = {what: (folder / f"{name}.{what}").open("wb") for what in ("idx", *_COLUMNS)}
        self._buffers = {what: array("q") for what in self._files}
        self._folder, self._name = folder, name
        self._last: list[int] = []  # the last piece, which the next one may continue
        self.position, self.documents, self.text_bytes, self.unknown = 1, 0, 0, 0  # the first token is an end token

    def add(self, file: int, document: Document, n_bytes: int, unknown: int) -> None:
        """Add a document of file number `file`."""
        for at, n in document.extents:
            begin, count, same, first = self._last or (0, 0, -1, 0)
            if (same, first + count, begin + count) == (file, at, self.position):
                self._last[1] += n
            else:
                self._keep_last()
                self._last = [self.position, n, file, at]
            self.position += n
        self.position += not document.has_end
        self._put("idx", self.position)
        self.documents += 1
        self.text_bytes += n_bytes
        self.unknown += int((document.tokens == unknown).sum()) if unknown >= 0 else 0

    def close(self) -> None:
        """Write what is left, and join the columns of the extents."""
        self._keep_last()
        for what, stream in self._files.items():
            self._buffers[what].tofile(stream)
            stream.close()
        with (self._folder / f"{self._name}.extents").open("wb") as to:
            for column in _COLUMNS:
                file = self._folder / f"{self._name}.{column}"
                with file.open("rb") as column_file:
                    shutil.copyfileobj(column_file, to)
                file.unlink()

    def _keep_last(self) -> None:
        for what, value in zip(_COLUMNS, self._last, strict=False):
            self._put(what, value)

    def _put(self, what: str, value: int) -> None:
        buffer = self._buffers[what]
        buffer.append(value)
        if len(buffer) >= _BUFFERED:
            buffer.tofile(self._files[what])
            del buffer[:]


def _write(indices: list[Index], made_with: Settings, partial: Path, below: int) -> tuple[int, list[_Split]]:
    """Write the files of both splits.

    Args:
        below: documents whose hash is below this are held out.

    Returns:
        the lowest hash of a document, and the splits.
    """
    if partial.is_dir():  # of a command that was killed, or the first pass
        if others := foreign(partial):
            raise DataError(f"{partial} contains {others[0]}, which is not part of a preparation; choose another --out")
        shutil.rmtree(partial)
    partial.mkdir()
    splits = [_Split(partial, name) for name in metas.SPLITS]
    lowest, total = plan.HASH_RANGE, sum(index.bin.stat().st_size for index in indices)
    with tqdm(total=total, unit="B", unit_scale=True, disable=not sys.stderr.isatty(), leave=False) as bar:
        for number, index in enumerate(indices):
            left = documents(index, made_with)
            while some := list(islice(left, _TOGETHER)):
                for document, text in zip(some, _decoded(some, made_with.tokenizer), strict=True):
                    value = plan.document_hash(text)
                    lowest = min(lowest, value)
                    splits[value < below].add(number, document, len(text), made_with.unknown)
                    bar.update((len(document.tokens) + document.has_end) * index.dtype.itemsize)
    for split in splits:
        split.close()
    return lowest, splits


def _finish(indices: list[Index], made_with: Settings, folder: Path, splits: list[_Split], made_from: str) -> None:
    """Hash all files, and write meta.json."""
    train, val = splits
    write_durably(folder / "tokenizer.json", made_with.tokenizer.to_str(pretty=True).encode())
    sources = [{"path": str(index.bin), "dtype": index.dtype.name} for index in indices]
    write_durably(folder / SOURCES, (json.dumps({"files": sources}, indent=2) + "\n").encode())
    ours = [f"{split}.{what}" for split in metas.SPLITS for what in ("idx", "extents")]
    for name in ours:
        with (folder / name).open("rb") as stream:
            os.fsync(stream.fileno())
    tokens = [str(index.bin) for index in indices]
    files = summary.all_files(folder, ["tokenizer.json", SOURCES, *ours, *tokens])
    meta = metas.Meta(
        format_version=metas.IN_PLACE,
        documents=train.documents + val.documents,
        val_documents=val.documents,
        text_bytes=train.text_bytes + val.text_bytes,
        val_text_bytes=val.text_bytes,
        train_tokens=train.position,
        val_tokens=val.position,
        unknown_tokens=train.unknown + val.unknown,
        vocab_size=made_with.vocab_size,
        end_token=made_with.end,
        shard_tokens=max(train.position, val.position),
        tokenizer_sha256=bpe.sha256(made_with.tokenizer),
        tokens_sha256=summary.identity_in_place(files),
        made_from=made_from,
        files=files,
        skipped={},
        skipped_first=[],
    )
    write_durably(folder / "meta.json", (json.dumps(asdict(meta), indent=2) + "\n").encode())
    sync_folder(folder)
