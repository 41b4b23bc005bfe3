"""Which documents share a sequence, when they are packed whole: an index that is made once, and mapped by every run.

A document of L tokens (its end mark counted) takes L of the T places of a sequence. Longer ones are cut into
pieces of T. Within a window of some ten thousand pieces, each goes, the longest first, to the sequence with the least
room that is enough for it (best-fit decreasing). What is left of a sequence is padding. Nothing is dropped, and every
document is in one sequence, so an epoch is still an epoch.

    packed-T-HASH/train.pieces   (P, 2) int64: where a piece begins in the token stream, and its length
    packed-T-HASH/train.rows     (R + 1, 2) int64: how many pieces, and tokens, the sequences before r have
"""

import bisect
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.data.meta import SPLITS, Meta, document_ends
from torchtitan_lite.errors import DataError

_WINDOW = 1 << 15  # documents that are packed together
Pairs = NDArray[np.int64]


def pack(folder: Path, meta: Meta, seq_len: int, say: Callable[[str], None]) -> Path:
    """The folder of the index for sequences of this length; made if it is not there yet.

    Raises:
        DataError: it can't be written, or the ends of documents are damaged.
    """
    index = folder / f"packed-{seq_len}-{meta.tokens_sha256[:12]}"
    try:
        if not index.is_dir():
            with FileLock(folder / f"{index.name}.lock"):
                if not index.is_dir():
                    say(f"data    packing the documents of {folder} into sequences of {seq_len}, once for all runs ...")
                    beside = index.with_name(f"{index.name}.partial")
                    shutil.rmtree(beside, ignore_errors=True)
                    beside.mkdir()
                    for split in SPLITS:
                        _write(beside, split, document_ends(folder, meta, split), seq_len)
                    beside.rename(index)
    except OSError as error:
        raise DataError(
            f'data.packing = "best_fit" keeps an index in {folder}, which can\'t be written: {error}'
        ) from None
    return index


def _write(index: Path, split: str, ends: Pairs, seq_len: int) -> None:
    before = np.zeros(2, np.int64)  # pieces, tokens
    with (index / f"{split}.pieces").open("wb") as pieces, (index / f"{split}.rows").open("wb") as rows:
        rows.write(before.tobytes())
        for first in range(0, len(ends), _WINDOW):
            begin = int(ends[first - 1]) if first else 1
            for row in _rows(_pieces(begin, np.asarray(ends[first : first + _WINDOW]), seq_len), seq_len):
                before += (len(row), row[:, 1].sum())
                pieces.write(row.tobytes())
                rows.write(before.tobytes())
        for stream in (pieces, rows):
            stream.flush()
            os.fsync(stream.fileno())


def _pieces(begin: int, ends: Pairs, seq_len: int) -> Pairs:
    """(P, 2): beginnings and lengths, at most seq_len each, of the documents that end at `ends`."""
    begins = np.concatenate(([begin], ends[:-1]))
    counts = -(-(ends - begins) // seq_len)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[document] + number * seq_len
    return np.stack((starts, np.minimum(ends[document] - starts, seq_len)), axis=1)


def _rows(pieces: Pairs, seq_len: int) -> Iterator[Any]:
    """The pieces of each sequence, in the order of the text; sequences in the order of their first pieces."""
    rows: list[list[int]] = []
    rooms: list[int] = []  # the sizes of room that there are, ascending
    with_room: list[list[int]] = [[] for _ in range(seq_len + 1)]  # sequences by their room
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
        if left := room - length:
            if not with_room[left]:
                bisect.insort(rooms, left)
            with_room[left].append(row)
    for row_pieces in sorted(sorted(row) for row in rows):
        yield pieces[row_pieces]


def pack_all(data: DataSet, seq_len: int, say: Callable[[str], None]) -> None:
    """Make the index of each source, before there is a process group that would have to wait."""
    for source in data.sources:
        pack(source.folder, source.meta, seq_len, say)
