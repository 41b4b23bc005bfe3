"""Where the documents of prepared data end, checked while it is read."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.data.repair import remedy
from torchtitan_lite.data.token_files import Meta
from torchtitan_lite.errors import DataError

_ENDS = 1 << 20  # document ends checked at a time


def document_ends(folder: Path, meta: Meta, split: str) -> NDArray[np.int64]:
    """The end of each document in a split's stream, memory-mapped and checked.

    Raises:
        DataError: the ends are not increasing, or do not match the stream's length.
    """
    file = folder / f"{split}.idx"
    try:
        ends = np.memmap(file, dtype=np.int64, mode="r")
    except (OSError, ValueError) as error:  # ValueError: empty, or not a multiple of 8 bytes
        raise DataError(f"{file} can't be read: {error}") from None
    before, n_tokens = 1, meta.tokens(split)  # the stream begins with an end token
    for first in range(0, len(ends), _ENDS):
        some = ends[first : first + _ENDS]
        good = np.diff(some, prepend=before) > 0
        good &= some <= n_tokens
        if not good.all():
            bad = first + int(np.argmin(good))
            raise DataError(_wrong_end(file, bad, int(ends[bad]), int(ends[bad - 1]) if bad else 1, n_tokens))
        before = some[-1]
    if ends[-1] != n_tokens:
        raise DataError(_wrong_end(file, len(ends) - 1, int(ends[-1]), n_tokens - 1, n_tokens))
    return ends


def _wrong_end(file: Path, number: int, end: int, before: int, n_tokens: int) -> str:
    return (
        f"{file} is damaged: document {number:,} (at byte {8 * number:,}) ends at token {end:,}, but should end after "
        f"{before:,} and at most at {n_tokens:,}; {remedy(file.parent)}"
    )
