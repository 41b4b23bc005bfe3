"""Which text: the user's .txt and .jsonl files, or the standard library of the Python that runs this.

A document is the text of a .jsonl line, or a block of at most 64 KiB of another file, cut at a line end. It is the unit
that goes to training or to validation. A corpus of fewer than 16 blocks is cut into smaller ones, so that even a short
file has something to validate on. Text is never repaired: a file that is not what it says it is stops the run, by name.
"""

import glob
import json
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_lite.errors import DataError

MAX_BLOCK = 64 * 1024  # bytes
_MIN_BLOCK = 1024
_NEWLINE = b"\n"
_KINDS = (".txt", ".jsonl")
_ENOUGH_BLOCKS = 16
# Tests are two thirds of the library, and many distributions leave them out; the others are not the library's own.
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Files in a fixed order, each with the name that stands for it in messages and in the cache's key."""

    files: tuple[Path, ...]
    text_key: str = "text"  # of .jsonl lines
    python_source: bool = False  # decode by the encoding that a source file declares (PEP 263), else strict UTF-8

    def identity(self) -> list[list[str | int]]:
        """What decides the text without reading it: path, size and time of change (ns) of each file."""
        return [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in self.files]


def find(path: str | list[str], text_key: str = "text") -> Corpus:
    """The files that `[data] path` means: a .txt or .jsonl file, a folder (all of those below it), a glob, or a list.

    Raises:
        DataError: nothing was found, or a file is of a kind that can't be read.
    """
    if path == "":
        return _standard_library()
    files: list[Path] = []
    for entry in [path] if isinstance(path, str) else path:
        found = [Path(p) for p in sorted(glob.glob(str(Path(entry).expanduser()), recursive=True))]
        texts = [t for p in found for t in (_below(p) if p.is_dir() else [p]) if t.is_file()]
        if not texts:
            raise DataError(f"data.path: no .txt or .jsonl file at {entry} (looked in {Path.cwd()})")
        files += texts
    for file in files:
        if file.suffix not in _KINDS:
            raise DataError(
                f"{file}: only .txt and .jsonl files can be read; convert it, or rename it if it is plain text"
            )
    return Corpus(tuple(dict.fromkeys(files)), text_key)


def _below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix in _KINDS)


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if p.is_file() and _SKIPPED.isdisjoint(p.relative_to(root).parts[:-1]))
    if not files:
        raise DataError(f"Python's standard library has no source files at {root}; set data.path to text of your own")
    return Corpus(tuple(files), python_source=True)


def documents(corpus: Corpus) -> Iterator[str]:
    """The blocks of all files, in order; joined, the blocks of a file are its text.

    Raises:
        DataError: a file that can't be read or decoded, with its name and the line.
    """
    size = sum(file.stat().st_size for file in corpus.files)
    limit = min(MAX_BLOCK, max(size // _ENOUGH_BLOCKS, _MIN_BLOCK))
    for file in corpus.files:
        try:
            if file.suffix == ".jsonl":
                yield from _json_texts(file, corpus.text_key)
            else:
                yield from _blocks(file, _declared_encoding(file) if corpus.python_source else "utf-8", limit)
        except (OSError, SyntaxError) as error:
            raise DataError(f"{file}: can't be read: {error}") from None


def _declared_encoding(file: Path) -> str:
    with file.open("rb") as stream:
        return tokenize.detect_encoding(stream.readline)[0]


def _blocks(file: Path, encoding: str, limit: int) -> Iterator[str]:
    """Cut the file at the last line end before `limit` bytes, or, in a longer line, between two characters."""
    line = 1
    pending = b""
    with file.open("rb") as stream:
        while pending := pending + stream.read(limit - len(pending)):
            end = len(pending) if len(pending) < limit else pending.rfind(_NEWLINE) + 1 or _last_whole(pending)
            try:
                yield pending[:end].decode(encoding)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file}: line {line + pending.count(_NEWLINE, 0, error.start)}: byte "
                    f"{pending[error.start]:#04x} is not {encoding}; convert the file to UTF-8 or take it out"
                ) from None
            line += pending.count(_NEWLINE, 0, end)
            pending = pending[end:]


def _json_texts(file: Path, key: str) -> Iterator[str]:
    """The text of each line, which has to be a JSON object with a string that is not empty under this key."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:  # of JSON or of UTF-8
                raise DataError(f"{file}: line {number}: not JSON: {error}") from None
            if not isinstance(record, dict) or key not in record:
                found = f"its keys are {', '.join(record) or '-'}" if isinstance(record, dict) else "it is no object"
                raise DataError(f'{file}: line {number}: no "{key}": {found}; data.text_key names the key of the text')
            if not isinstance(record[key], str) or not record[key]:
                raise DataError(f'{file}: line {number}: "{key}" should be text, and is {json.dumps(record[key])[:40]}')
            try:
                record[key].encode()
            except UnicodeEncodeError as error:  # "\\ud83d", half of a pair, is valid JSON and no text
                raise DataError(f'{file}: line {number}: "{key}" is no text: {error.reason}') from None
            yield record[key]


def _last_whole(data: bytes) -> int:
    """Where the last UTF-8 character that may be cut off begins: continuation bytes are 10xxxxxx."""
    start = len(data) - 1
    while start > len(data) - 4 and data[start] & 0xC0 == 0x80:
        start -= 1
    return start
