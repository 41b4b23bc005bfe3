"""Detects changed text whose files have the same paths, sizes and mtimes.

Prepared data is looked up by path, size and mtime, without reading the files. A restored backup or `touch -r` can
reproduce these three, but not inode and ctime. A record in the cache holds the latter two and a hash of each file. If
they differ, the file is hashed again; if the hash differs too, it becomes part of the text's identity.

Text of less than 256 MiB is hashed in full. For larger text, the size and 64 blocks of each file are hashed.
"""

import contextlib
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from torchtitan_lite.config import find_text
from torchtitan_lite.data.prepare.corpus import Content, Corpus, stat_of
from torchtitan_lite.data.token_files import HASHED_BYTES, spots
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import write_durably

CHANGED = "the text was changed while it was being read; run the same command again to start over with the new text"


@dataclass(frozen=True)
class _Record:
    """The cached hashes of a text's files."""

    first: list[str]  # when it was first prepared
    last: list[str]  # at the last check
    stamps: list[list[int]]  # inode and ctime at the last check


def with_content(corpus: Corpus, folder: Path) -> Corpus:
    """The corpus with its content, compared with the record in this folder, which is updated.

    Raises:
        DataError: a file is missing or unreadable.
    """
    file = folder / f"{hashlib.sha256(json.dumps(corpus.identity()).encode()).hexdigest()[:16]}.content.json"
    stamps = _stamps(corpus)
    record = _read(file, len(stamps))
    if record is None or record.stamps != stamps:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a read-only cache
                stack.enter_context(FileLock(file.with_suffix(".lock")))
            record = _updated(corpus, _read(file, len(stamps)), stamps)
            with contextlib.suppress(OSError):
                write_durably(file, json.dumps(vars(record)).encode())
    return replace(corpus, content=Content(stamps, record.last, record.last != record.first))


def require_unchanged(corpus: Corpus) -> None:
    """Raise DataError if the text was changed after `with_content`."""
    content = corpus.content
    if content and _stamps(corpus) != content.stamps and _hashes(corpus, corpus.files) != content.hashes:
        raise DataError(CHANGED)


def _updated(corpus: Corpus, record: _Record | None, stamps: list[list[int]]) -> _Record:
    if record is None:
        hashes = _hashes(corpus, corpus.files)
        return _Record(hashes, hashes, stamps)
    changed = [i for i, stamp in enumerate(stamps) if stamp != record.stamps[i]]
    found = dict(zip(changed, _hashes(corpus, tuple(corpus.files[i] for i in changed)), strict=True))
    return _Record(record.first, [found.get(i, old) for i, old in enumerate(record.last)], stamps)


def _stamps(corpus: Corpus) -> list[list[int]]:
    """Inode and ctime of each file."""
    return [[(info := stat_of(file)).st_ino, info.st_ctime_ns] for file in corpus.files]


def _hashes(corpus: Corpus, files: tuple[Path, ...]) -> list[str]:
    in_full = corpus.size() < HASHED_BYTES  # all files together

    def of(file: Path) -> str:
        with find_text.reading(file):
            if not in_full:
                return spots(file)[:32]
            with file.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()[:32]

    with ThreadPoolExecutor() as pool:
        return list(pool.map(of, files))


def _read(file: Path, n_files: int) -> _Record | None:
    """The record; None if it is missing or damaged."""
    try:
        record = _Record(**json.loads(file.read_bytes()))
        return record if {n_files} == {len(record.first), len(record.last), len(record.stamps)} else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None
