"""Reads the stream of a split from Megatron's .bin files, in place.

A prepared folder of this kind has no train-*.bin and val-*.bin, but

    megatron.json                    the .bin files, their dtypes, and the format
    train.extents, val.extents       (4, N) int64: where N pieces of the stream are

A column of extents is: the position in the stream, the number of tokens, the number of the file, and the first token in
it. Positions that no piece covers hold the end token: the first one, and the ends of documents that have none in their
file. token_files.py has the format of the stream.
"""

import json
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.data.megatron.index_file import DTYPES
from torchtitan_lite.data.repair import remedy
from torchtitan_lite.errors import DataError

SOURCES = "megatron.json"


class BinFile:
    """The tokens of a .bin file. It is read, not mapped: a truncated file is then an error, not a SIGBUS."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self._dtype = path, dtype
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror}") from None
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, first: int, n: int, vocab_size: int) -> NDArray[Any]:
        """Tokens first, ..., first + n - 1 of the file, (n,).

        Raises:
            DataError: the file is unreadable or truncated, or has a token outside the vocabulary.
        """
        size = self._dtype.itemsize
        try:
            data = os.pread(self._descriptor, n * size, first * size)
        except OSError as error:
            raise DataError(f"{self.path} can't be read at byte {first * size:,}: {error.strerror}") from None
        if len(data) != n * size:
            raise DataError(f"{self.path} ends before token {first + n:,}: it was truncated")
        tokens = np.frombuffer(data, self._dtype)
        if n and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
            bad = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
            raise DataError(
                f"{self.path}: token {first + bad:,} (at byte {(first + bad) * size:,}) is {int(tokens[bad])}, but the "
                f"vocabulary has {vocab_size} entries: the file was made with another tokenizer, or is damaged"
            )
        return tokens


class MegatronTokens:
    """The token stream of one split."""

    def __init__(self, folder: Path, meta: Any, split: str, dtype: type[np.unsignedinteger]) -> None:
        """
        Raises:
            DataError: megatron.json or the extents are damaged.
        """
        self._file, self._meta, self._dtype = folder / f"{split}.extents", meta, dtype
        self._n_tokens = meta.tokens(split)
        try:
            self._extents = np.memmap(self._file, dtype="<i8", mode="r").reshape(4, -1)
            listed = json.loads((folder / SOURCES).read_bytes())["files"]
            self._sources = [(Path(one["path"]), np.dtype(one["dtype"])) for one in listed]
            if any(dtype.name not in DTYPES.values() for _, dtype in self._sources):
                raise ValueError("a dtype is not that of tokens")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{folder}: {self._file.name} or {SOURCES} is damaged ({error}); {remedy(folder)}"
            ) from None
        self._files: dict[int, BinFile] = {}

    def read(self, first: int, end: int) -> NDArray[Any]:
        """Tokens first, ..., end - 1 of the stream, (end - first,), in the dtype of other prepared folders.

        Raises:
            DataError: see BinFile, or the extents are damaged.
        """
        found = np.full(end - first, self._meta.end_token, self._dtype)
        positions = self._extents[0]
        number = max(int(np.searchsorted(positions, first, "right")) - 1, 0)
        while number < len(positions) and (begin := int(positions[number])) < end:
            _, n, file, at = self._extents[:, number].tolist()
            if not (0 < begin < begin + n <= self._n_tokens and 0 <= file < len(self._sources) and at >= 0):
                raise DataError(f"{self._file} is damaged: piece {number:,}; {remedy(self._file.parent)}")
            low, high = max(first, begin), min(end, begin + n)
            if low < high:
                part = self._open(file).read(at + low - begin, high - low, self._meta.vocab_size)
                found[low - first : high - first] = part
            number += 1
        return found

    def _open(self, number: int) -> BinFile:
        if number not in self._files:
            self._files[number] = BinFile(*self._sources[number])
        return self._files[number]
