"""Best-fit packing of documents into sequences. The index is built once; every run memory-maps it.

A document of L tokens, including its marks (token_files.py), takes L of a sequence's T places. Longer documents are cut
into pieces of T. In each window of 32,768 documents, pieces are placed longest first, each into the sequence with the
least sufficient room (best-fit decreasing). The rest of a sequence is padding. An epoch has every token exactly once.

A sequence is its documents, each preceded by the token before it in the stream, which predicts its first token.

    packed-T-HASH/train.pieces   (P, 2) int64: the start of each piece in the token stream, and its length
    packed-T-HASH/train.rows     (R + 1, 2) int64: the number of pieces, and of tokens, before sequence r
    packed-T-HASH/hashes.json    sizes and hashes of these files, checked at each start like the files in meta.json
"""

import bisect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from torchtitan_lite.config.paths import reading
from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Array, Rows, Samples
from torchtitan_lite.data.token_files import FILES, SPLITS, Meta, TokenFiles, changed, document_ends, hashed, read_meta
from torchtitan_lite.errors import DataError
from torchtitan_lite.files import flush_to_disk, write_durably
from torchtitan_lite.terminal import print_line

_WINDOW = 1 << 15  # documents packed together
Pairs = NDArray[np.int64]
NAMES = tuple(f"{split}.{what}" for split in SPLITS for what in ("pieces", "rows"))
HASHES = "hashes.json"


class PackedSamples(Samples):
    """The packed sequences of one split of a prepared folder."""

    def __init__(self, folder: Path, split: str, seq_len: int) -> None:
        """
        Raises:
            DataError: the folder or its index is damaged, or the index can't be written.
        """
        meta = read_meta(folder)
        self.seq_len = self.target_len = seq_len
        self._stream = TokenFiles(folder, meta, split)
        index = pack(folder, meta, seq_len)
        self._pieces: Array = np.memmap(index / f"{split}.pieces", dtype=np.int64, mode="r").reshape(-1, 2)
        self._rows: Array = np.memmap(index / f"{split}.rows", dtype=np.int64, mode="r").reshape(-1, 2)
        self.n_samples = len(self._rows) - 1
        self.mean_tokens = (meta.tokens(split) - 1) / self.n_samples

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        rows = Rows.empty(len(run_samples), self.seq_len)
        for row, index in enumerate(self.indices(run_samples, seed).tolist()):
            at = 0
            for begin, length in self._pieces[self._rows[index, 0] : self._rows[index + 1, 0]].tolist():
                tokens = self._stream.read(begin - 1, begin + length)
                rows.tokens[row, at : at + length], rows.targets[row, at : at + length] = tokens[:-1], tokens[1:]
                rows.begins[row, at] = True
                at += length
            rows.begins[row, at : at + 1] = True  # the padding does not belong to the last document
        return rows

    def n_targets(self, run_samples: Indices, seed: int | None) -> int:
        indices = self.indices(run_samples, seed)
        return int((self._rows[indices + 1, 1] - self._rows[indices, 1]).sum())


def pack(folder: Path, meta: Meta, seq_len: int) -> Path:
    """Return the index folder for this sequence length. Builds it if missing; always checks its hashes.

    Raises:
        DataError: the index can't be written or is damaged.
    """
    index = folder / f"packed-{seq_len}-{meta.tokens_sha256[:12]}"
    try:
        if not index.is_dir():
            with FileLock(folder / f"{index.name}.lock"):
                if not index.is_dir():
                    print_line(f"data    packing documents of {folder} into sequences of {seq_len}, for all runs ...")
                    partial = index.with_name(f"{index.name}.partial")
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir()
                    for split in SPLITS:
                        _write(document_ends(folder, meta, split), seq_len, partial / split)
                    hashes = FILES.dump_python(hashed(partial, NAMES))
                    write_durably(partial / HASHES, json.dumps(hashes).encode())
                    partial.rename(index)
    except OSError as error:
        raise DataError(
            f'data.packing = "best_fit" writes an index to {folder}, which is not possible: {error}'
        ) from None
    for problem in damage(index):
        raise DataError(problem)
    return index


def damage(index: Path, *, in_full: bool = False) -> list[str]:
    """Return a message for each damaged file of an index; `in_full` reads every byte."""
    try:
        with reading(index):
            problems = changed(index, FILES.validate_json((index / HASHES).read_bytes()), in_full=in_full)
    except ValueError:  # the content is invalid
        problems = [f"{HASHES} has changed since it was made"]
    remedy = "delete this folder: the next start builds it again"
    return [f"{index}: the index of packed documents is damaged ({problem}); {remedy}" for problem in problems]


def _write(ends: Pairs, seq_len: int, name: Path) -> None:
    """Write NAME.pieces and NAME.rows for documents with these ends."""
    with name.with_suffix(".pieces").open("wb") as pieces, name.with_suffix(".rows").open("wb") as rows:
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


def _pieces(begin: int, ends: Pairs, seq_len: int) -> Pairs:
    """Return start and length, (P, 2), of each piece of at most seq_len tokens, for documents that end at `ends`."""
    begins = np.concatenate(([begin], ends[:-1]))
    counts = -(-(ends - begins) // seq_len)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + number * seq_len
    return np.stack((starts, np.minimum(ends[document] - starts, seq_len)), axis=1)


def _rows(pieces: Pairs, seq_len: int) -> Iterator[Any]:
    """Yield the pieces of each sequence, in text order; sequences follow the order of their first pieces."""
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
