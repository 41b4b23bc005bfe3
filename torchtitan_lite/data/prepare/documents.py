"""Reads documents in a fixed order and constant memory.

A document is the text of a .jsonl line or of a .csv, .tsv or .parquet row, or a block of at most 64 KiB of plain text,
cut at a line end. A pair is a line or row with two texts. Text is never repaired: malformed text becomes a Problem with
its file and line.
"""

import codecs
import csv
import functools
import gzip
import hashlib
import importlib
import io
import itertools
import json
import pkgutil
import re
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
        "python -m torchtitan_lite.data.prepare ... --on-error skip (train.py: --data.on_error=skip)"
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
        count: called with the number of bytes that were read for each document.
    """
    for number in range(first, len(corpus.files)):
        place = position = 0
        try:
            with io.BufferedReader(io.FileIO(corpus.files[number]), _READ) as stream:
                for place, values in _read(corpus, corpus.files[number], stream):
                    yield _document(corpus, number, place, values)
                    count(stream.tell() - position)
                    position = stream.tell()
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
            return Problem(
                file, place, "no text", f"{json.dumps(key, ensure_ascii=False)} should be text, but is {shown}"
            )
    texts = corpus.source_prefix + values[0], *values[1:]
    contents = [text.encode() for text in texts]
    if max(map(len, contents)) > LONGEST:
        return Problem(file, place, *_TOO_LONG)
    number = int.from_bytes(hashlib.sha256(contents[0]).digest()[:8])
    return Document(file, place, texts, sum(map(len, contents)), number)


# --- the readers (READERS in config/sections/data.py) -----------------------------------------------------------

_TOO_LONG = Unusable("a text that is too long", f"is longer than {LONGEST:,} bytes; divide it into several documents")
_QUOTED = (
    "has a field in quotation marks that spans lines or names a column; in a .tsv each line is a row, and a quotation "
    "mark is text: rename the file to .csv (which may be separated by tabs), or write it without quoting"
)
_HOW = (
    "--text-key (data.text_key) can name another, or several that are tried in order (--text-key=text,body); pairs "
    "have --source-key and --target-key"
)


def read_txt(stream: BinaryIO, corpus: Corpus) -> Read:
    """Yield blocks that end at the last line end within the limit. A longer line is cut between characters."""
    if len(corpus.keys) == 2:
        raise ValueError("has no columns; pairs are read from .jsonl, .csv, .tsv and .parquet files")
    line, pending = 1, stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
    while pending := pending + stream.read(corpus.block - len(pending)):
        at_end = len(pending) < corpus.block
        # else before the last character, which may be incomplete: continuation bytes of UTF-8 are 10xxxxxx
        last = re.search(rb"(?s).[\x80-\xbf]{0,3}\Z", pending[-4:])
        cut = len(pending) if at_end or not last else pending.rfind(b"\n") + 1 or len(pending) - len(last[0])
        try:
            yield line, [pending[:cut].decode()]
        except UnicodeDecodeError as error:
            at = line + pending.count(b"\n", 0, error.start)
            is_utf16 = pending.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            how = " (the file is UTF-16: iconv -f UTF-16 -t UTF-8 converts it)" * is_utf16
            yield at, Unusable("not UTF-8", f"byte {pending[error.start]:#04x} is not utf-8{how}")
        line += pending.count(b"\n", 0, cut)
        pending = pending[cut:]


def read_without_suffix(stream: io.BufferedReader, corpus: Corpus) -> Read:
    """Read JSON lines if the first one begins with an object's key, or else plain text."""
    yield from (read_jsonl if re.match(rb'\s*{\s*"', stream.peek(_READ)) else read_txt)(stream, corpus)


def read_jsonl(stream: io.BufferedReader, corpus: Corpus) -> Read:
    """Yield the values of each line, which must be a JSON object with all keys. Ignores empty lines.

    Raises:
        ValueError: the file holds a list, or JSON over several lines.
    """
    if re.match(rb"(\xef\xbb\xbf)?\s*(\[|{(.*[\[{,:])?[ \t\r]*\n)", stream.peek(_READ)):
        raise ValueError(
            "is one JSON list or object, instead of an object in each line; this makes .jsonl of it: "
            "python -c 'import json, sys; x = json.load(sys.stdin); [print(json.dumps(row)) for row in (x if "
            "isinstance(x, list) else [x])]' < FILE > FILE.jsonl"
        )
    for place, line in _lines(stream):
        if line is None:
            yield place, _TOO_LONG
        elif line := line.removeprefix(codecs.BOM_UTF8).strip():
            yield place, _json_values(line, corpus)


def _json_values(line: bytes, corpus: Corpus) -> Sequence[Any] | Unusable:
    try:
        record = from_json(line)
    except ValueError as error:
        return Unusable("not JSON", f"not JSON in UTF-8: {error}")
    values = [_value(record, key) for key in corpus.keys]
    if None in values:
        keys = (
            f"its keys are {', '.join(record)[:200]}"
            if record and isinstance(record, dict)
            else "it is not an object with keys"
        )
        missing = f"no {json.dumps(corpus.keys[values.index(None)], ensure_ascii=False)}"
        return Unusable(missing, f"{missing} (or null): {keys}; {_HOW}")
    return values


def _value(record: Any, key: str | list[str]) -> Any:
    """Return the first value under these keys, or under one key or path "a.b" of keys; None if there is none."""
    if isinstance(key, list):
        return next((value for name in key if (value := _value(record, name)) is not None), None)
    first, _, rest = key.partition(".")
    inner = record if isinstance(record, dict) else {}
    return inner.get(key) if key in inner or not rest else _value(inner.get(first), rest)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield lines with their numbers; None: the line is too long."""
    number = 0
    while line := stream.readline(LONGEST + 1):
        number += 1
        if too_long := len(line) > LONGEST and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(_READ)
        yield number, None if too_long else line


def _table(stream: BinaryIO, corpus: Corpus, delimiters: str) -> Read:
    """Yield the rows of a table split at the delimiter that gives the header all keys.

    If it is the tab of a .tsv, a line is a row, and a quotation mark is text.
    """
    csv.field_size_limit(LONGEST)
    lines, head, by_line = _decoded(stream), list[str](), delimiters == "\t"
    at, width, place, last = list[int](), 0, 1, ""  # width: columns of the header; last: cell of the row before

    def fit(delimiter: str) -> tuple[bool, int]:
        columns = next(csv.reader(head[-1:], delimiter=delimiter), [])
        return all(any(name in columns for name in _names(key)) for key in corpus.keys), len(columns)

    try:
        while not (head and head[-1].strip()) and (line := next(lines, "")):
            head.append(line)
        lines = itertools.chain(head, lines)
        quoted: Any = csv.reader(lines, strict=True, delimiter=max(delimiters, key=fit))
        plain = (text.split("\t") if (text := line.rstrip("\r\n")) else [] for line in lines)
        for row in plain if by_line else quoted:
            if by_line and row and (not at or len(row) < width) and any(cell[:1] == '"' for cell in (last, *row)):
                raise ValueError(f"line {place} {_QUOTED}")
            if not at and row:
                at, width = _positions(row, corpus), len(row)
            elif row and max(at) < len(row) <= width:
                yield place, [row[i] for i in at]
            elif row:  # e.g. an unquoted comma cuts a text, and moves the rest into the next column
                yield place, Unusable("a row of the wrong length", f"has {len(row)} columns, its header has {width}")
            place, last = (place if by_line else quoted.line_num) + 1, row[-1] if row else last
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"the row at line {place}: {error}") from None


read_csv = functools.partial(_table, delimiters=",\t;|")
read_tsv = functools.partial(_table, delimiters="\t")


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
    at = list[int]()
    for key in corpus.keys:
        if not (name := next((name for name in _names(key) if name in columns), "")):
            raise ValueError(
                f"no column {json.dumps(key, ensure_ascii=False)}: its columns are {', '.join(columns)[:200]}; {_HOW}"
            )
        if (n := columns.count(name)) > 1:
            raise ValueError(f'has {n} columns "{name}"; which one holds the text is ambiguous')
        at.append(columns.index(name))
    return at


def _names(key: str | list[str]) -> list[str]:
    return [key] if isinstance(key, str) else key


def read_parquet(stream: BinaryIO, corpus: Corpus) -> Read:
    row = 0
    with need("pyarrow.parquet").ParquetFile(stream) as table:
        columns = table.schema_arrow.names
        columns += sorted({table.schema.column(i).path for i in range(len(table.schema))} - {*columns})  # of structs
        _positions(columns, corpus)
        names = [name for key in corpus.keys for name in _names(key) if name in columns]
        for batch in table.iter_batches(batch_size=256, columns=names, use_threads=False):
            for record in batch.to_pylist():
                row += 1
                yield row, [_value(record, key) for key in corpus.keys]


# --- files ------------------------------------------------------------------------------------------------------


def _read(corpus: Corpus, file: Path, stream: Any) -> Read:
    if file.suffix.lower() == ".gz":
        stream = io.BufferedReader(gzip.GzipFile(fileobj=stream), _READ)
    elif file.suffix.lower() == ".zst":
        stream = io.BufferedReader(need("pyarrow").CompressedInputStream(stream, "zstd"), _READ)
    yield from pkgutil.resolve_name(READERS[kind(file, (*corpus.text_suffixes, ""))].read)(stream, corpus)


def need(package: str) -> Any:
    """Import a package of the extra `data`. Raises DataError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise DataError(
            f".parquet and .zst files need the package {package.split('.')[0]}, which is not installed: "
            "pip install 'torchtitan_lite[data]' (in a clone: pip install -e '.[data]')"
        ) from None
