"""Makes a prepared folder of Megatron's files, whose tokens stay where they are.

One pass reads all tokens, to check them and to decode each document: as for text, the hash of a document's text decides
whether it is held out. A document ends with its end token in the file (preprocess_data.py --append-eod), or at its end.
Where a file has end tokens within a document, it is cut there. Empty documents are left out.

data/token_files.py describes the folder, and reads it.
"""

import contextlib
import hashlib
import json
import shutil
import struct
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
from torchtitan_lite.data.prepare import corpus, plan, special_tokens, summary
from torchtitan_lite.data.prepare.encode import partial_folder
from torchtitan_lite.data.prepare.megatron_index import Index, prefix_of, read_index
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import flush_to_disk, sync_folder, write_durably
from torchtitan_lite.terminal import counted

_TOGETHER = 256  # documents decoded at a time
_BLOCK = 1 << 24  # tokens read at a time
_PIECE = struct.Struct("<4q")
_PIECES = 1 << 16  # copied at a time


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

    @classmethod
    def of(cls, path: Path, end_token: str, val_fraction: float) -> "Settings":
        """
        Args:
            path: the tokenizer with which the files were made.

        Raises:
            DataError: it is not a tokenizer, or has no such end token.
        """
        original = bpe.load(path)
        end = bpe.end_token(original, end_token)
        tokenizer = special_tokens.literal(original.to_str(pretty=True))
        return cls(tokenizer, bpe.size(tokenizer), end, special_tokens.unknown(tokenizer, end), val_fraction)


def prepare(prefixes: Sequence[Path], settings: Settings, out: Path) -> None:
    """Make the folder `out`, unless it has been made of the same files.

    Raises:
        DataError: a file is missing or damaged, does not suit the tokenizer, or has too few documents; or `out` exists.
    """
    indices = [read_index(prefix_of(paths.expand(prefix)).absolute()) for prefix in prefixes]
    if len({index.bin for index in indices}) < len(indices):
        raise DataError("--from-megatron names the same files twice; data.sources gives a text more weight")
    made_from = _made_from(indices, settings)
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = out.with_name(f".{out.name}.lock")
    try:
        with FileLock(lock, blocking=False), contextlib.ExitStack() as after:
            after.callback(lock.unlink, missing_ok=True)
            if not out.exists():
                _make(indices, settings, out, made_from)
            elif not paths.is_prepared(out) or metas.read_meta(out).made_from != made_from:
                raise DataError(f"{out} exists, and was made from other files or options; choose another --out")
    except Timeout:
        raise DataError(f"{out} is being prepared by another process") from None
    print(summary.report(out, settings.tokenizer))


def _made_from(indices: list[Index], settings: Settings) -> str:
    files = [file for index in indices for file in (index.bin, index.bin.with_suffix(".idx"))]
    stats = [(str(file), (info := file.stat()).st_size, info.st_mtime_ns) for file in files]
    inputs = ["megatron", stats, bpe.sha256(settings.tokenizer), settings.end, settings.val_fraction]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _make(indices: list[Index], settings: Settings, out: Path, made_from: str) -> None:
    partial = partial_folder(out)
    below = int(settings.val_fraction * plan.HASH_RANGE)
    lowest, splits = _write_splits(indices, settings, partial, below)
    if (n := sum(split.documents for split in splits)) < 2:
        raise DataError(
            f"the files have {counted(n, 'document')} with text; at least 2 are needed, to train and to validate"
        )
    if lowest >= below:  # as for text: at least one document is held out
        _, splits = _write_splits(indices, settings, partial, lowest + 1)
    if not splits[0].documents:
        raise DataError("all documents were held out; use more of them, or a smaller --val-fraction")
    if _made_from(indices, settings) != made_from:
        raise DataError(corpus.CHANGED)
    _finish(indices, settings, partial, splits, made_from)
    partial.rename(out)
    sync_folder(out.parent)
    if n != (in_files := sum(index.n_documents for index in indices)):
        print(f"data    {in_files:,} documents in the files; cut at end tokens, and without empty ones, {n:,}")


# --- reading ----------------------------------------------------------------------------------------------------


def documents(index: Index, settings: Settings) -> Iterator[Document]:
    """The documents of a .bin file, without empty ones, each with at most one end token: its last."""
    file = metas.TokenFile(index.bin, index.dtype)
    for number in range(index.n_documents):
        parts: list[NDArray[Any]] = []
        extents: list[tuple[int, int]] = []
        for first, n in _blocks(index.extents(number)):
            try:
                tokens = file.read(first, n, settings.vocab_size)
            except metas.TokenError as error:
                raise DataError(f"{file.path}: {error}: {metas.OTHER_TOKENIZER}") from None
            begin = 0
            for end in (*np.flatnonzero(tokens == settings.end).tolist(), n):
                has_end = end < n
                if end > begin:
                    parts.append(tokens[begin:end])
                if end + has_end > begin:
                    extents.append((first + begin, end + has_end - begin))
                begin = end + 1
                if has_end:
                    if parts:
                        yield Document(np.concatenate(parts), extents, True)
                    parts, extents = [], []
        if parts:
            yield Document(np.concatenate(parts), extents, False)


def _blocks(extents: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The extents in blocks: a file may have all of its text in one document, cut by end tokens."""
    for first, n in extents:
        for at in range(0, n, _BLOCK):
            yield first + at, min(_BLOCK, n - at)


def _decode(batch: list[Document], tokenizer: Tokenizer) -> list[bytes]:
    try:
        texts = tokenizer.decode_batch([document.tokens.tolist() for document in batch], skip_special_tokens=False)
    except BaseException as error:  # the library's panics are not Exceptions
        raise DataError(f"the tokenizer can't decode the tokens: {bpe.reason(error)}") from None
    return [text.encode() for text in texts]


# --- writing ----------------------------------------------------------------------------------------------------


class _Split:
    """Writes the files of one split: where each document ends, and where the pieces of the stream are."""

    def __init__(self, folder: Path, name: str) -> None:
        self._idx = (folder / f"{name}.idx").open("wb")
        self._pieces = (folder / f"{name}.pieces").open("w+b")  # as rows, which close() makes columns
        self._extents = folder / f"{name}.extents"
        self._piece = [0, 0, -1, 0]  # the last one, which may grow: position, number of tokens, file, first token
        self.position = 1  # the first token of the stream is an end token
        self.documents = self.text_bytes = self.unknown = 0

    def add(self, file: int, document: Document, n_bytes: int, unknown: int) -> None:
        """Add a document of file number `file`."""
        for at, n in document.extents:
            position, count, last_file, first = self._piece
            if (last_file, first + count, position + count) == (file, at, self.position):
                self._piece[1] += n
            else:
                self._write_piece()
                self._piece = [self.position, n, file, at]
            self.position += n
        self.position += not document.has_end
        self._idx.write(struct.pack("<q", self.position))
        self.documents += 1
        self.text_bytes += n_bytes
        self.unknown += int((document.tokens == unknown).sum()) if unknown >= 0 else 0

    def _write_piece(self) -> None:
        if self._piece[1]:
            self._pieces.write(_PIECE.pack(*self._piece))

    def close(self) -> None:
        """Complete the files."""
        self._write_piece()
        with self._extents.open("wb") as extents, self._pieces as pieces:
            for column in range(4):
                pieces.seek(0)
                while rows := pieces.read(_PIECES * _PIECE.size):
                    extents.write(np.frombuffer(rows, "<i8").reshape(-1, 4)[:, column].tobytes())
            flush_to_disk(extents)
        Path(self._pieces.name).unlink()
        flush_to_disk(self._idx)
        self._idx.close()


def _write_splits(indices: list[Index], settings: Settings, partial: Path, below: int) -> tuple[int, list[_Split]]:
    """Write the files of both splits.

    Args:
        below: documents whose hash is below this are held out.

    Returns:
        the lowest hash of a document, and the splits.
    """
    if partial.is_dir():  # of a command that was killed, or the first pass
        if others := metas.foreign(partial):
            raise DataError(f"{partial} contains {others[0]}, which is not part of a preparation; choose another --out")
        shutil.rmtree(partial)
    partial.mkdir()
    splits = [_Split(partial, name) for name in metas.SPLITS]
    lowest, total = plan.HASH_RANGE, sum(index.bin.stat().st_size for index in indices)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for number, index in enumerate(indices):
            remaining = documents(index, settings)
            while batch := list(islice(remaining, _TOGETHER)):
                for document, text in zip(batch, _decode(batch, settings.tokenizer), strict=True):
                    value = plan.document_hash(text)
                    lowest = min(lowest, value)
                    splits[value < below].add(number, document, len(text), settings.unknown)
                    bar.update((len(document.tokens) + document.has_end) * index.dtype.itemsize)
    for split in splits:
        split.close()
    return lowest, splits


def _finish(indices: list[Index], settings: Settings, folder: Path, splits: list[_Split], made_from: str) -> None:
    """Hash all files, and write meta.json."""
    train, val = splits
    write_durably(folder / "tokenizer.json", settings.tokenizer.to_str(pretty=True).encode())
    sources = [{"path": str(index.bin), "dtype": index.dtype.name} for index in indices]
    write_durably(folder / metas.SOURCES, (json.dumps({"files": sources}, indent=2) + "\n").encode())
    names = ["tokenizer.json", metas.SOURCES]
    names += [f"{split}.{suffix}" for split in metas.SPLITS for suffix in ("idx", "extents")]
    files = summary.all_files(folder, [*names, *(str(index.bin) for index in indices)])
    meta = metas.Meta(
        format_version=metas.IN_PLACE,
        documents=train.documents + val.documents,
        val_documents=val.documents,
        text_bytes=train.text_bytes + val.text_bytes,
        val_text_bytes=val.text_bytes,
        train_tokens=train.position,
        val_tokens=val.position,
        unknown_tokens=train.unknown + val.unknown,
        vocab_size=settings.vocab_size,
        end_token=settings.end,
        shard_tokens=max(train.position, val.position),
        tokenizer_sha256=bpe.sha256(settings.tokenizer),
        tokens_sha256=summary.identity_in_place(files),
        made_from=made_from,
        files=files,
        skipped={},
        skipped_first=[],
    )
    write_durably(folder / "meta.json", (json.dumps(asdict(meta), indent=2) + "\n").encode())
    sync_folder(folder)
