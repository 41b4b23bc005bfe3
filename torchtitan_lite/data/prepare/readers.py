"""Reads files into chunks of documents, in a fixed order and constant memory.

A document is the text of a .jsonl line, of a row of a .csv, .tsv or .parquet file, or a block of at most 64 KiB of
plain text, cut at a line end. A pair is a line or row with two texts. `chunks` reads, decompresses and cuts
files; the workers call `decode`, which checks the texts, in parallel. Text is never repaired: malformed text becomes a
Problem with its file and line.
"""

import contextlib
import csv
import gzip
import importlib
import io
import itertools
import json
import tokenize
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from torchtitan_lite.data.prepare import plan
from torchtitan_lite.data.prepare.corpus import Corpus, kind, stat_of
from torchtitan_lite.errors import DataError

_READ = 128 * 1024
_NEWLINE = b"\n"


@dataclass(frozen=True)
class Problem:
    """An unusable text, or an unusable rest of a file."""

    place: str  # "line 3", "row 7", or empty: the file
    reason: str  # its category
    detail: str

    def of(self, file: Path) -> str:
        """The message, with the file."""
        return ": ".join(part for part in (str(file), self.place, self.detail) if part)


@dataclass
class Chunk:
    """Consecutive documents of one file."""

    file: int  # index in the corpus
    number: int  # index in the file
    texts: Literal["plain", "json"]  # json: each document is a line with a JSON object
    unit: str  # the unit of places: "line" or "row"
    read_bytes: int = 0  # bytes of the file up to the end of this chunk
    last: bool = False  # the last of the file
    places: list[int] = field(default_factory=list)  # the start of each document
    documents: list[bytes] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)  # found while reading


Item = tuple[int, bytes] | Problem
Texts = tuple[str, ...]  # of a document: one, or a source and its target


def refusal(file: Path, problem: Problem) -> DataError:
    """The error for an unusable text."""
    return DataError(
        f"{problem.of(file)}; correct or remove it, or skip it with "
        "`python -m torchtitan_lite.data.prepare ... --on-error skip`"
    )


def unit_of(file: Path) -> str:
    """What the place of a document in this file is."""
    return "row" if kind(file) == ".parquet" else "line"


def chunks(corpus: Corpus, max_document_bytes: int, first: int = 0) -> Iterator[Chunk]:
    """All chunks, starting at file number `first`. The last chunk of a file may be empty."""
    limit = corpus.block()
    for number in range(first, len(corpus.files)):
        yield from _chunks_of(corpus, number, limit, max_document_bytes)


def _chunks_of(corpus: Corpus, number: int, limit: int, longest: int) -> Iterator[Chunk]:
    file = corpus.files[number]
    suffix = ".txt" if corpus.python_source else kind(file, corpus.text_suffixes)
    texts: Literal["plain", "json"] = "json" if suffix == ".jsonl" or corpus.target_key else "plain"
    unit = unit_of(file)
    chunk, size = Chunk(number, 0, texts, unit), 0
    raw: list[BinaryIO] = []
    for item in _items(corpus, file, suffix, limit, longest, raw):
        if isinstance(item, Problem):
            chunk.problems.append(item)
            continue
        if size and (size + len(item[1]) > plan.CHUNK_BYTES or len(chunk.places) == plan.CHUNK_DOCUMENTS):
            chunk.read_bytes = raw[0].tell() if raw else 0
            yield chunk
            chunk, size = Chunk(number, chunk.number + 1, texts, unit), 0
        chunk.places.append(item[0])
        chunk.documents.append(item[1])
        size += len(item[1])
    chunk.read_bytes, chunk.last = stat_of(file).st_size, True
    yield chunk


class _CutError(Exception):
    """The rest of a file can't be read."""


def _items(corpus: Corpus, file: Path, suffix: str, limit: int, longest: int, raw: list[BinaryIO]) -> Iterator[Item]:
    """The documents of a file with their places. The open file is appended to `raw`, to report progress."""
    place = 0
    columns = corpus.keys
    try:
        if file.stat().st_size == 0:
            yield Problem("", "an empty file", "is empty")
            return
        if suffix == ".parquet":
            yield from _parquet(file, columns, longest)
            return
        if suffix == ".txt" and corpus.target_key:
            yield Problem("", "a file without pairs", "has no columns; pairs are read from .jsonl, .csv and .parquet")
            return
        with file.open("rb") as opened:
            raw.append(opened)
            stream: BinaryIO = opened
            if corpus.python_source:
                with tokenize.open(file) as declared:
                    stream = io.BytesIO(file.read_bytes().decode(declared.encoding).encode())
            elif file.suffix.lower() == ".gz":
                stream = io.BufferedReader(gzip.GzipFile(fileobj=opened), _READ)
            elif file.suffix.lower() == ".zst":
                stream = io.BufferedReader(_Zstandard(opened), _READ)
            if suffix == ".txt":
                items = _blocks(stream, limit, longest)
            else:
                lines = _lines(stream, longest)
                items = _rows(lines, columns, longest) if suffix == ".csv" else lines
            for item in items:
                if not isinstance(item, Problem):
                    place = item[0]
                yield item
    except _CutError as error:
        yield Problem("", "a file that ends too early or is damaged", str(error))
    except (OSError, EOFError, zlib.error, SyntaxError, ValueError) as error:
        after = f" after line {place}" if place else ""
        yield Problem("", "a file that can't be read to its end", f"can't be read{after}: {error}")


# --- bytes ------------------------------------------------------------------------------------------------------


class _Zstandard(io.RawIOBase):
    """The frames of a .zst file. zstandard's own reader does not detect a truncated file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._library = _need("zstandard", ".zst")
        self._stream, self._ready = stream, b""
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            rest = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            data = rest or self._stream.read(_READ)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the compressed data is truncated")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(data)
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
        n = min(len(buffer), len(self._ready))
        buffer[:n], self._ready = self._ready[:n], self._ready[n:]
        return n


def _need(package: str, suffix: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise DataError(
            f"{suffix} files need the package {package}, which is not installed: pip install 'torchtitan_lite[data]' "
            f"(in a clone: pip install -e '.[data]')"
        ) from None


# --- documents --------------------------------------------------------------------------------------------------


def _too_long(line: int, longest: int) -> Problem:
    return Problem(
        f"line {line}", "a line that is too long", f"is longer than {longest:,} bytes (--max-document-bytes)"
    )


def _lines(stream: BinaryIO, longest: int) -> Iterator[Item]:
    """Lines with their numbers. A line that is too long becomes a Problem."""
    number = 0
    while line := stream.readline(longest + 1):
        number += 1
        if len(line) > longest and not line.endswith(_NEWLINE):
            yield _too_long(number, longest)
            while (line := stream.readline(_READ)) and not line.endswith(_NEWLINE):
                pass
            continue
        yield number, line


def _blocks(stream: BinaryIO, limit: int, longest: int) -> Iterator[Item]:
    """Blocks that end at the last line end within `limit` bytes. A longer line is cut between two characters."""
    line, pending = 1, b""
    pieces: list[tuple[int, bytes]] = []  # of a line whose end is not read yet: it may still be too long
    while pending := pending + stream.read(limit - len(pending)):
        at_end = len(pending) < limit
        first_end = pending.find(_NEWLINE) + 1 or (len(pending) if at_end else 0)  # 0: not read yet
        if (pieces or not first_end) and sum(len(p) for _, p in pieces) + (first_end or len(pending)) > longest + 1:
            yield _too_long(line, longest)
            pieces = []
            while not first_end and (pending := stream.read(limit)):
                first_end = pending.find(_NEWLINE) + 1
            pending, line = pending[first_end:], line + 1
            continue
        if not first_end:
            cut = _character_boundary(pending)
            pieces.append((line, pending[:cut]))
        else:
            yield from pieces
            pieces = []
            cut = len(pending) if at_end else pending.rfind(_NEWLINE) + 1
            yield line, pending[:cut]
            line += pending.count(_NEWLINE, 0, cut)
        pending = pending[cut:]
    yield from pieces


def _character_boundary(data: bytes) -> int:
    """The start of the last UTF-8 character, which may be incomplete. Continuation bytes are 10xxxxxx."""
    start = len(data) - 1
    while start > len(data) - 4 and data[start] & 0xC0 == 0x80:
        start -= 1
    return start


def _document(columns: list[str], values: list[str]) -> bytes:
    """A row's text; of a pair, a line as in .jsonl."""
    return values[0].encode() if len(columns) == 1 else json.dumps(dict(zip(columns, values, strict=True))).encode()


def _rows(lines: Iterable[Item], columns: list[str], longest: int) -> Iterator[Item]:
    """The texts of one column of a .csv file with a header line, or the pairs of two."""
    csv.field_size_limit(longest)
    decoded, head = _decoded(lines), list[str]()
    while not (head and head[-1].strip()) and (line := next(decoded, "")):
        head.append(line)
    delimiter = _delimiter(head, decoded, columns)
    reader = csv.reader(itertools.chain(head, decoded), strict=True, delimiter=delimiter)
    at: list[int] = []
    width = 0  # of the header
    while True:
        place = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise _CutError(f"line {place}: not CSV: {error}; the rest of the file can't be read") from None
        if not row:  # an empty line
            continue
        if not at:
            at, width = _positions(columns, row), len(row)
        elif len(row) > width:  # an unquoted comma cuts a text, or makes a piece of it the next column
            yield Problem(f"line {place}", "a row that is too long", f"has {len(row)} columns, its header has {width}")
        elif absent := [column for column, i in zip(columns, at, strict=True) if i >= len(row)]:
            yield Problem(f"line {place}", "a row that is too short", f"has {len(row)} columns, so no {absent[0]}")
        else:
            yield place, _document(columns, [row[i] for i in at])


def _delimiter(head: list[str], following: Iterator[str], columns: list[str]) -> str:
    """The first delimiter by which the header has all columns; if there is none, that which makes the most columns.

    Args:
        head: ends with the first line of the header. Lines after it that are read here, because a name has line
            breaks, are appended.
    """
    begin, rows = max(len(head) - 1, 0), {}

    def header() -> Iterator[str]:
        yield from head[begin:]
        for line in following:
            head.append(line)
            yield line

    for delimiter in ",\t;|":
        with contextlib.suppress(csv.Error, StopIteration):
            rows[delimiter] = next(csv.reader(header(), strict=True, delimiter=delimiter))
    complete = [delimiter for delimiter, row in rows.items() if set(columns) <= set(row)]
    return next(iter(complete), max(rows, key=lambda delimiter: len(rows[delimiter])) if "," in rows else ",")


def _positions(columns: list[str], names: list[str]) -> list[int]:
    """Where the columns are among all of a table.

    Raises:
        _CutError: one of them is missing, or there are several of its name.
    """
    for column in columns:
        if column not in names:
            raise _CutError(
                f'no column "{column}": its columns are {", ".join(names)[:200]}; {_how(columns, "column")}'
            )
        if (n := names.count(column)) > 1:
            raise _CutError(f'has {n} columns "{column}"; which one holds the text is ambiguous')
    return [names.index(column) for column in columns]


def _how(keys: list[str], noun: str) -> str:
    """How to choose the key or column of a text, or those of a pair."""
    if len(keys) == 2:
        return f"--source-key and --target-key (or data.source_key and data.target_key) name the {noun}s"
    return f"data.text_key names the {noun} (or --text-key)"


def _decoded(lines: Iterable[Item]) -> Iterator[str]:
    for item in lines:
        if isinstance(item, Problem):
            raise _CutError(f"{item.place} {item.detail}; the rest of the file can't be read")
        number, line = item
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise _CutError(
                f"line {number}: byte {line[error.start]:#04x} is not utf-8; the rest of the file can't be read"
            ) from None


def _parquet(file: Path, columns: list[str], longest: int) -> Iterator[Item]:
    pyarrow, parquet = _need("pyarrow", ".parquet"), _need("pyarrow.parquet", ".parquet")
    row = 0
    try:
        with parquet.ParquetFile(file) as table:
            for column, at in zip(columns, _positions(columns, table.schema_arrow.names), strict=True):
                dtype = table.schema_arrow.types[at]
                if not (pyarrow.types.is_string(dtype) or pyarrow.types.is_large_string(dtype)):
                    raise _CutError(f'column "{column}" has type {dtype}; it should be string')
            for batch in table.iter_batches(batch_size=256, columns=columns, use_threads=False):
                for values in zip(*(batch.column(column) for column in columns), strict=True):
                    row += 1
                    yield _parquet_row(row, columns, [value.as_buffer() for value in values], longest)
    except (pyarrow.ArrowException, OSError) as error:
        raise _CutError(f"can't be read as parquet after row {row}: {error}") from None


def _parquet_row(row: int, columns: list[str], texts: list[Any], longest: int) -> Item:
    """A row's document, from pyarrow's buffers."""
    for column, text in zip(columns, texts, strict=True):
        if text is None:
            return Problem(f"row {row}", "no text", f'"{column}" is null')
        if text.size > longest:
            detail = f"is longer than {longest:,} bytes (--max-document-bytes)"
            return Problem(f"row {row}", "a text that is too long", detail)
    if len(texts) == 1:
        return row, texts[0].to_pybytes()
    try:
        return row, _document(columns, [text.to_pybytes().decode() for text in texts])
    except UnicodeDecodeError as error:
        return Problem(f"row {row}", "not UTF-8", f"byte {error.object[error.start]:#04x} is not utf-8")


# --- texts ------------------------------------------------------------------------------------------------------


def decode(chunk: Chunk, keys: list[str], prefix: str) -> Iterator[tuple[int, Texts | Problem]]:
    """The line or row of each document, and its texts or its problem."""
    for number, document in zip(chunk.places, chunk.documents, strict=True):
        if chunk.texts == "json" and not document.strip():
            continue  # an empty line
        text = _json_texts(document, keys) if chunk.texts == "json" else _plain_text(document, number, chunk.unit)
        if isinstance(text, Problem):
            yield number, text if text.place else Problem(f"{chunk.unit} {number}", text.reason, text.detail)
        else:
            yield number, (prefix + text[0], *text[1:])


def _plain_text(document: bytes, number: int, unit: str) -> Texts | Problem:
    if not document:
        return Problem("", "an empty text", "the text is empty")
    try:
        return (document.decode(),)
    except UnicodeDecodeError as error:
        return Problem(
            f"{unit} {number + (document.count(10, 0, error.start) if unit == 'line' else 0)}",
            "not UTF-8",
            f"byte {document[error.start]:#04x} is not utf-8",
        )


def _json_texts(line: bytes, keys: list[str]) -> Texts | Problem:
    """The texts of a line, which must be a JSON object with a non-empty string under each key.

    A side of a pair that is only white space is empty too: there is nothing to answer, or to learn.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        return Problem("", "not JSON", f"not JSON: {error}")
    for key in keys:
        if not isinstance(record, dict):
            return Problem("", f'no "{key}"', f'no "{key}": it is not an object; {_how(keys, "key")}')
        if key not in record:
            names = ", ".join(record)[:200] or "-"
            return Problem("", f'no "{key}"', f'no "{key}": its keys are {names}; {_how(keys, "key")}')
        text = record[key]
        if not isinstance(text, str) or not text or (len(keys) == 2 and not text.strip()):
            return Problem("", "no text", f'"{key}" should be text, but is {json.dumps(text)[:40]}')
        try:
            text.encode()
        except UnicodeEncodeError as error:  # "\\ud83d", half of a surrogate pair, is valid JSON
            return Problem("", "no text", f'"{key}" is not valid text: {error.reason}')
    return tuple(record[key] for key in keys)
