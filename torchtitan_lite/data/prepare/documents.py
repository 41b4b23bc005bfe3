"""Reads documents in a fixed order and constant memory.

A document is the text of a .jsonl line or of a .csv, .tsv or .parquet row, or a block of at most 64 KiB of plain text,
cut at a line end. A pair is a line or row with two texts. Text is never repaired: malformed text becomes a Problem with
its file and line.
"""

import codecs
import csv
import gzip
import hashlib
import importlib
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from pydantic_core import from_json

from torchtitan_lite.config.sections.data import READERS
from torchtitan_lite.data.prepare.texts import Corpus, kind
from torchtitan_lite.errors import DataError

HASH_RANGE = 2**64
LONGEST = 16 << 20  # maximum bytes of a .jsonl line or a text
_READ = 128 * 1024
OnError = Literal["stop", "skip"]
# errors of the file system, decompression, csv, pyarrow or a reader: the rest of the file can't be read
_UNREADABLE = OSError, EOFError, zlib.error, csv.Error, SyntaxError, ValueError, NotImplementedError


class Document(NamedTuple):
    """A text, or a source and its target."""

    file: int  # number in the corpus
    place: int  # its first line, or its row
    texts: tuple[str, ...]
    n_bytes: int  # length of the texts in UTF-8
    hash: int  # of the first text: 0 <= hash < HASH_RANGE. Decides the split


class Problem(NamedTuple):
    """An unusable text, or an unusable rest of a file."""

    file: int
    place: int  # 0: the whole file
    reason: str  # the category
    detail: str

    def message(self, corpus: Corpus) -> str:
        """Return the message with its place."""
        return f"{corpus.where(self.file, self.place)}: {self.detail}"


class Unusable(NamedTuple):
    """What a reader yields for an unusable document."""

    reason: str
    detail: str


Read = Iterator[tuple[int, Sequence[Any] | Unusable]]  # for each document: line or row, and the value of each key


def refusal(corpus: Corpus, problem: Problem) -> DataError:
    """Return the error for an unusable text."""
    return DataError(
        f"{problem.message(corpus)}; correct or remove it, or leave it out with "
        "python -m torchtitan_lite.data.prepare ... --on-error skip"
    )


def usable(corpus: Corpus, on_error: OnError = "stop", first: int = 0) -> Iterator[Document]:
    """Yield the documents, starting at file number `first`.

    Raises:
        DataError: a text is unusable, with "stop".
    """
    for item in documents(corpus, first):
        if isinstance(item, Document):
            yield item
        elif on_error == "stop":
            raise refusal(corpus, item)


def documents(
    corpus: Corpus, first: int = 0, count: Callable[[int], object] = lambda n: None
) -> Iterator[Document | Problem]:
    """Yield all documents and problems, starting at file number `first`.

    Args:
        count: called with the number of bytes after each read.
    """
    for number in range(first, len(corpus.files)):
        place = 0
        try:
            for place, values in _read(corpus, corpus.files[number], count):
                yield _document(corpus, number, place, values)
        except _UNREADABLE as error:
            after = f" after {corpus.where(number, place).rpartition(': ')[2]}" if place else ""
            yield Problem(number, 0, "a file that can't be read to its end", f"can't be read{after}: {error}")


def _document(corpus: Corpus, file: int, place: int, values: Sequence[Any] | Unusable) -> Document | Problem:
    """Check that the values are non-empty strings (in a pair, not only white space), and make a document of them."""
    if isinstance(values, Unusable):
        return Problem(file, place, *values)
    for key, value in zip(corpus.keys, values, strict=True):
        if not isinstance(value, str) or not (value.strip() if len(values) == 2 else value):
            shown = json.dumps(value, default=str)[:40]
            return Problem(file, place, "no text", f'"{key}" should be text, but is {shown}')
    texts = corpus.source_prefix + values[0], *values[1:]
    try:
        contents = [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        return Problem(file, place, "no text", f"is not valid text: {error.reason}")
    if max(map(len, contents)) > LONGEST:
        return Problem(file, place, *_TOO_LONG)
    number = int.from_bytes(hashlib.sha256(contents[0]).digest()[:8])
    return Document(file, place, texts, sum(map(len, contents)), number)


# --- the readers (READERS in config/sections/data.py) -----------------------------------------------------------

_TOO_LONG = Unusable("a text that is too long", f"is longer than {LONGEST:,} bytes; divide it into several documents")
_HOW = "--text-key (data.text_key), or --source-key and --target-key for pairs, can name others"


def read_txt(stream: BinaryIO, corpus: Corpus) -> Read:
    """Yield blocks that end at the last line end within the limit. A longer line is cut between characters."""
    if len(corpus.keys) == 2:
        raise ValueError("has no columns; pairs are read from .jsonl, .csv, .tsv and .parquet files")
    line, pending = 1, stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
    while pending := pending + stream.read(corpus.block - len(pending)):
        at_end = len(pending) < corpus.block
        cut = len(pending) if at_end else pending.rfind(b"\n") + 1 or _character_boundary(pending)
        try:
            yield line, [pending[:cut].decode()]
        except UnicodeDecodeError as error:
            at = line + pending.count(b"\n", 0, error.start)
            yield at, Unusable("not UTF-8", f"byte {pending[error.start]:#04x} is not utf-8")
        line += pending.count(b"\n", 0, cut)
        pending = pending[cut:]


def _character_boundary(data: bytes) -> int:
    """Return the start of the last UTF-8 character, which may be incomplete. Continuation bytes are 10xxxxxx."""
    start = len(data) - 1
    while start > len(data) - 4 and data[start] & 0xC0 == 0x80:
        start -= 1
    return start


def read_jsonl(stream: BinaryIO, corpus: Corpus) -> Read:
    """Yield the values of each line, which must be a JSON object with all keys. Ignores empty lines."""
    for place, line in _lines(stream):
        if line is None:
            yield place, _TOO_LONG
        elif line := line.removeprefix(codecs.BOM_UTF8).strip():
            yield place, _json_values(line, corpus)


def _json_values(line: bytes, corpus: Corpus) -> Sequence[Any] | Unusable:
    try:
        record = from_json(line)  # faster than json.loads, but refuses half a surrogate pair in any key
    except ValueError as error:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # not JSON or not UTF-8
            return Unusable("not JSON", f"not JSON in UTF-8: {error}")
    has = record if isinstance(record, dict) else {}
    if missing := [key for key in corpus.keys if key not in has]:
        keys = f"its keys are {', '.join(has)[:200]}" if has else "it is not an object with keys"
        return Unusable(f'no "{missing[0]}"', f'no "{missing[0]}": {keys}; {_HOW}')
    return [has[key] for key in corpus.keys]


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield lines with their numbers; None: the line is too long."""
    number = 0
    while line := stream.readline(LONGEST + 1):
        number += 1
        if too_long := len(line) > LONGEST and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(_READ)
        yield number, None if too_long else line


def read_csv(stream: BinaryIO, corpus: Corpus) -> Read:
    """Yield the rows of a table split at commas, tabs, semicolons or bars, whichever gives the header all keys."""
    yield from _table(stream, corpus, ",\t;|")


def read_tsv(stream: BinaryIO, corpus: Corpus) -> Read:
    yield from _table(stream, corpus, "\t")


def _table(stream: BinaryIO, corpus: Corpus, delimiters: str) -> Read:
    csv.field_size_limit(LONGEST)
    lines, head = _decoded(stream), list[str]()
    while not (head and head[-1].strip()) and (line := next(lines, "")):
        head.append(line)

    def fit(delimiter: str) -> tuple[bool, int]:
        columns = next(csv.reader(head[-1:], delimiter=delimiter), [])
        return set(corpus.keys) <= set(columns), len(columns)

    rows = csv.reader(itertools.chain(head, lines), strict=True, delimiter=max(delimiters, key=fit))
    at, width, place = list[int](), 0, 1  # width: columns of the header
    for row in rows:
        if not at and row:
            at, width = _positions(row, corpus), len(row)
        elif row and max(at) < len(row) <= width:
            yield place, [row[i] for i in at]
        elif row:  # e.g. an unquoted comma cuts a text, and moves the rest into the next column
            yield place, Unusable("a row of the wrong length", f"has {len(row)} columns, its header has {width}")
        place = rows.line_num + 1


def _decoded(stream: BinaryIO) -> Iterator[str]:
    for number, line in _lines(stream):
        if line is None:
            raise ValueError(f"line {number} is longer than {LONGEST:,} bytes")
        yield line.decode("utf-8-sig" if number == 1 else "utf-8")


def _positions(columns: Sequence[str], corpus: Corpus) -> list[int]:
    """Return the positions of the keys among the columns of a table.

    Raises:
        ValueError: a column is missing, or several have its name.
    """
    for key in corpus.keys:
        if key not in columns:
            raise ValueError(f'no column "{key}": its columns are {", ".join(columns)[:200]}; {_HOW}')
        if (n := columns.count(key)) > 1:
            raise ValueError(f'has {n} columns "{key}"; which one holds the text is ambiguous')
    return [columns.index(key) for key in corpus.keys]


def read_parquet(stream: BinaryIO, corpus: Corpus) -> Read:
    row = 0
    with need("pyarrow.parquet").ParquetFile(stream) as table:
        _positions(table.schema_arrow.names, corpus)
        for batch in table.iter_batches(batch_size=256, columns=list(corpus.keys), use_threads=False):
            for values in zip(*(batch.column(key) for key in corpus.keys), strict=True):
                row += 1
                yield row, [value.as_py() for value in values]


# --- files ------------------------------------------------------------------------------------------------------


class _Counted(io.FileIO):
    """A file that counts the bytes read from it."""

    def __init__(self, file: Path, count: Callable[[int], object]) -> None:
        super().__init__(file)
        self._count = count

    def readinto(self, buffer: Any) -> int:
        n = super().readinto(buffer)
        self._count(n)
        return n


def _read(corpus: Corpus, file: Path, count: Callable[[int], object]) -> Read:
    with io.BufferedReader(_Counted(file, count), _READ) as opened:
        if not opened.peek(1):
            raise ValueError("is empty")
        stream: Any = opened
        if file.suffix.lower() == ".gz":
            stream = io.BufferedReader(gzip.GzipFile(fileobj=opened), _READ)
        elif file.suffix.lower() == ".zst":
            stream = io.BufferedReader(need("pyarrow").CompressedInputStream(opened, "zstd"), _READ)
        yield from READERS[kind(file, corpus.text_suffixes)].load()(stream, corpus)


def need(package: str) -> Any:
    """Import a package of the extra `data`. Raises DataError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise DataError(
            f".parquet and .zst files need the package {package.split('.')[0]}, which is not installed: "
            "pip install 'torchtitan_lite[data]' (in a clone: pip install -e '.[data]')"
        ) from None
