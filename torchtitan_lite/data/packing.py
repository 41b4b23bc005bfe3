"""Best-fit packing of documents into sequences. The index is built once and mapped by every run.

A document of L tokens, including its end token, takes L of the T places of a sequence; longer ones are cut into pieces
of T. In each window of 32,768 documents, the pieces are placed longest first, each into the sequence with the least
sufficient room (best-fit decreasing). The rest of a sequence is padding. An epoch has every token exactly once.

A sequence is its documents, each preceded by the previous end token, from which its first token is predicted.

    packed-T-HASH/train.pieces   (P, 2) int64: the start of each piece in the token stream, and its length
    packed-T-HASH/train.rows     (R + 1, 2) int64: the number of pieces, and of tokens, before sequence r
    packed-T-HASH/hashes.json    sizes and hashes of these files, checked at each start
"""

import bisect
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from torchtitan_lite.config.paths import reading
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Array, Rows, Samples
from torchtitan_lite.data.token_files import (
    HASHED_BYTES,
    PREPARE_AGAIN,
    SPLITS,
    File,
    Meta,
    TokenFiles,
    document_ends,
    read_meta,
    spots,
)
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import flush_to_disk, write_durably

_WINDOW = 1 << 15  # documents packed together
Pairs = NDArray[np.int64]
NAMES = tuple(f"{split}.{what}" for split in SPLITS for what in ("pieces", "rows"))
HASHES = "hashes.json"
REMEDY = f"delete the files {', '.join(NAMES)} and {HASHES} and this folder: the next start makes them again"
_checked: dict[Path, tuple[tuple[int, ...], ...]] = {}  # each verified index and the stats of its files


class PackedSamples(Samples):
    """The packed sequences of one split of a prepared folder."""

    def __init__(self, folder: Path, split: str, seq_len: int) -> None:
        """
        Raises:
            DataError: the folder or its index is damaged, or the index can't be written.
        """
        meta = read_meta(folder)
        self.seq_len = self.target_len = seq_len
        self._stream, self._n_tokens = TokenFiles(folder, meta, split), meta.tokens(split)
        self._index = pack(folder, meta, seq_len, lambda _: None)
        self._pieces: Array = np.memmap(self._index / f"{split}.pieces", dtype=np.int64, mode="r").reshape(-1, 2)
        self._rows: Array = np.memmap(self._index / f"{split}.rows", dtype=np.int64, mode="r").reshape(-1, 2)
        self.n_samples = len(self._rows) - 1
        self.mean_tokens = (self._n_tokens - 1) / self.n_samples

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        rows = Rows.empty(len(run_samples), self.seq_len)
        for row, index in enumerate(self.indices(run_samples, seed).tolist()):
            at = 0
            for begin, length in self._pieces[self._rows[index, 0] : self._rows[index + 1, 0]].tolist():
                if not (0 < begin < begin + length <= self._n_tokens and at + length <= self.seq_len):
                    raise DataError(
                        f"{self._index} is damaged: sequence {index:,} takes {length:,} tokens from {begin:,} on, "
                        f"after {at:,} others; {REMEDY}"
                    )
                tokens = self._stream.read(begin - 1, begin + length)
                rows.tokens[row, at : at + length], rows.targets[row, at : at + length] = tokens[:-1], tokens[1:]
                rows.begins[row, at] = True
                at += length
            rows.begins[row, at : at + 1] = True  # the padding does not belong to the last document
        return rows

    def n_targets(self, run_samples: Indices, seed: int | None) -> int:
        indices = self.indices(run_samples, seed)
        return int((self._rows[indices + 1, 1] - self._rows[indices, 1]).sum())


def pack(folder: Path, meta: Meta, seq_len: int, info: Callable[[str], None]) -> Path:
    """The index folder for this sequence length: built if missing, then checked against its hashes.

    Raises:
        DataError: the index can't be written or is damaged.
    """
    index = folder / f"packed-{seq_len}-{meta.tokens_sha256[:12]}"
    try:
        if not index.is_dir():
            with FileLock(folder / f"{index.name}.lock"):
                if not index.is_dir():
                    info(f"data    packing documents of {folder} into sequences of {seq_len}, once for all runs ...")
                    partial = index.with_name(f"{index.name}.partial")
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir()
                    hashes = {name: vars(file) for name, file in _make(folder, meta, seq_len, partial).items()}
                    write_durably(partial / HASHES, json.dumps(hashes).encode())
                    partial.rename(index)
    except OSError as error:
        raise DataError(
            f'data.packing = "best_fit" writes an index to {folder}, which is not possible: {error}'
        ) from None
    with reading(index):
        _require_undamaged(index)
    return index


def _require_undamaged(index: Path) -> None:
    """Check the index against its hashes. A process does not read unchanged files again.

    Raises:
        DataError: the index is damaged.
    """
    stats = [(index / name).stat() for name in NAMES if (index / name).is_file()]
    state = tuple((s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats)
    if _checked.get(index) == state:
        return
    for problem in _problems(index):
        raise DataError(problem)
    _checked[index] = state


def damaged_indices(folder: Path, meta: Meta) -> Iterator[str]:
    """Read every byte of the indices in a prepared folder. A line for each damaged file."""
    for index in sorted(folder.glob(f"packed-*-{meta.tokens_sha256[:12]}")):
        yield from _problems(index, read_all=True)


def _problems(index: Path, *, read_all: bool = False) -> Iterator[str]:
    try:
        content = json.loads((index / HASHES).read_bytes())
        expected = {name: File(**content[name]) for name in NAMES}
    except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
        yield f"{index}: the index of packed documents is damaged ({HASHES}); {REMEDY}"
        return
    for name, file in expected.items():
        path, problem = index / name, ""
        if not path.is_file():
            problem = "is missing"
        elif path.stat().st_size != file.bytes:
            problem = f"has {path.stat().st_size:,} bytes instead of {file.bytes:,}"
        else:
            in_full = read_all or file.bytes <= HASHED_BYTES
            if file != (File.of(path) if in_full else replace(file, spots=spots(path))):
                problem = "has changed since it was made"
        if problem:
            yield f"{index}: the index of packed documents is damaged ({name} {problem}); {REMEDY}"


def _make(folder: Path, meta: Meta, seq_len: int, index: Path) -> dict[str, File]:
    """Write the index files to the folder `index`.

    Raises:
        DataError: the .idx file has changed since it was prepared.
    """
    for split in SPLITS:
        ends_file = folder / f"{split}.idx"
        ends = document_ends(folder, meta, split)
        if File.of(ends_file) != meta.files[ends_file.name]:
            raise DataError(f"{ends_file} has changed since it was made: the prepared data is damaged; {PREPARE_AGAIN}")
        with (index / f"{split}.pieces").open("wb") as pieces, (index / f"{split}.rows").open("wb") as rows:
            before = np.zeros(2, np.int64)  # pieces, tokens
            rows.write(before.tobytes())
            for first in range(0, len(ends), _WINDOW):
                begin = int(ends[first - 1]) if first else 1
                for row in _rows(_pieces(begin, np.asarray(ends[first : first + _WINDOW]), seq_len), seq_len):
                    before += (len(row), row[:, 1].sum())
                    pieces.write(row.tobytes())
                    rows.write(before.tobytes())
            flush_to_disk(pieces)
            flush_to_disk(rows)
    return {name: File.of(index / name) for name in NAMES}


def _pieces(begin: int, ends: Pairs, seq_len: int) -> Pairs:
    """Starts and lengths, (P, 2), of the pieces of at most seq_len tokens of the documents that end at `ends`."""
    begins = np.concatenate(([begin], ends[:-1]))
    counts = -(-(ends - begins) // seq_len)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + number * seq_len
    return np.stack((starts, np.minimum(ends[document] - starts, seq_len)), axis=1)


def _rows(pieces: Pairs, seq_len: int) -> Iterator[Any]:
    """The pieces of each sequence in text order, and the sequences in the order of their first pieces."""
    rows: list[list[int]] = []
    rooms: list[int] = []  # the distinct amounts of free room, ascending
    with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]  # the sequences with each amount
    for piece in np.argsort(-pieces[:, 1], kind="stable").tolist():
        length = int(pieces[piece, 1])
        at = bisect.bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        else:
            room, row = seq_len, len(rows)
            rows.append([])
        rows[row].append(piece)
        if rest := room - length:
            if not with_room[rest]:
                bisect.insort(rooms, rest)
            with_room[rest].append(row)
    for row_pieces in sorted(sorted(row) for row in rows):
        yield pieces[row_pieces]


def pack_all(data: DataSet, seq_len: int, info: Callable[[str], None]) -> None:
    """Build the index of each source, before the process group exists: its collectives would time out."""
    for source in data.sources:
        pack(source.folder, source.meta, seq_len, info)
