"""Whether text with the same names, sizes and times is still the same text.

What was prepared is found by the path, size and mtime of each file, which takes no reading. Other text can have the
same three: a copy that keeps times, a restored backup, `touch -r`. It then has another inode or ctime, which no program
can set. So a record in the cache holds both, with a hash of each file. Where they differ, the file is hashed again. If
the hash differs too, the hashes become part of the text's identity, and it is prepared as other text.

Text of less than 256 MiB is hashed in full; of larger text, the size and 64 blocks of each file.
"""

import contextlib
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from torchtitan_lite.config import paths
from torchtitan_lite.data.prepare.corpus import Content, Corpus, stat_of
from torchtitan_lite.data.token_files import HASHED_BYTES, spots
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import write_durably


@dataclass(frozen=True)
class _Record:
    """What a cache knows of a text: the hashes that it was first prepared with, and those at the last look."""

    first: list[str]
    last: list[str]
    stamps: list[list[int]]


def known(corpus: Corpus, folder: Path) -> Corpus:
    """The corpus with its content, compared with what this folder has met under the same names, sizes and times.

    Raises:
        DataError: a file is gone, or can't be read.
    """
    file = folder / f"{hashlib.sha256(json.dumps(corpus.identity()).encode()).hexdigest()[:16]}.content.json"
    stamps = _stamps(corpus)
    record = _read(file, len(stamps))
    if record is None or record.stamps != stamps:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a cache that may only be read
                stack.enter_context(FileLock(file.with_suffix(".lock")))
            record = _looked_at(corpus, _read(file, len(stamps)), stamps)
            with contextlib.suppress(OSError):
                write_durably(file, json.dumps(vars(record)).encode())
    return replace(corpus, content=Content(stamps, record.last, record.last != record.first))


def require_unchanged(corpus: Corpus) -> None:
    """Refuse text that was changed after `known` looked at it.

    Raises:
        DataError: it was.
    """
    content = corpus.content
    if content and _stamps(corpus) != content.stamps and _hashes(corpus, corpus.files) != content.hashes:
        raise DataError("the text was changed while it was being read; the same command begins again with the new one")


def _looked_at(corpus: Corpus, record: _Record | None, stamps: list[list[int]]) -> _Record:
    if record is None:
        hashes = _hashes(corpus, corpus.files)
        return _Record(hashes, hashes, stamps)
    changed = [i for i, stamp in enumerate(stamps) if stamp != record.stamps[i]]
    found = dict(zip(changed, _hashes(corpus, tuple(corpus.files[i] for i in changed)), strict=True))
    return _Record(record.first, [found.get(i, old) for i, old in enumerate(record.last)], stamps)


def _stamps(corpus: Corpus) -> list[list[int]]:
    """Inode and ctime of each file: what changes when its content does, and with a copy."""
    return [[(info := stat_of(file)).st_ino, info.st_ctime_ns] for file in corpus.files]


def _hashes(corpus: Corpus, files: tuple[Path, ...]) -> list[str]:
    in_full = corpus.size() < HASHED_BYTES  # all files together

    def of(file: Path) -> str:
        with paths.reading(file):
            if not in_full:
                return spots(file)[:32]
            with file.open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()[:32]

    with ThreadPoolExecutor() as pool:
        return list(pool.map(of, files))


def _read(file: Path, n_files: int) -> _Record | None:
    """The record; None if there is none, or if it is damaged."""
    try:
        record = _Record(**json.loads(file.read_bytes()))
        return record if {n_files} == {len(record.first), len(record.last), len(record.stamps)} else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None
