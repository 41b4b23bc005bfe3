"""Reads Megatron's PREFIX.idx, which says where the sequences and documents of PREFIX.bin are, and checks it.

    9 bytes      MMIDIDX and two zeros
    uint64       the version, 1
    uint8        the dtype of the tokens
    uint64       S, the number of sequences
    uint64       D, the number of documents and 1
    int32 (S)    the length of each sequence, in tokens
    int64 (S)    where each sequence begins in PREFIX.bin, in bytes
    int64 (D)    the first sequence of each document, and S

All numbers are little-endian. Multimodal files have S more bytes, the mode of each sequence.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_lite.config.find_text import kind_of
from torchtitan_lite.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
_LEGACY = b"TNTIDX"
_HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6: "float64", 7: "float32"}
_BLOCK = 1 << 20  # sequences checked at a time


@dataclass(frozen=True)
class Index:
    """A pair of files. The arrays are memory-mapped."""

    bin: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]  # (S,)
    pointers: NDArray[np.int64]  # (S,) bytes
    documents: NDArray[np.int64]  # (documents + 1,)

    @property
    def n_documents(self) -> int:
        """The number of documents; some may be empty."""
        return len(self.documents) - 1

    def extents(self, document: int) -> list[tuple[int, int]]:
        """Where the tokens of a document are: (first token in the file, number of tokens), adjacent ones together."""
        extents: list[tuple[int, int]] = []
        for i in range(int(self.documents[document]), int(self.documents[document + 1])):
            first, n = int(self.pointers[i]) // self.dtype.itemsize, int(self.lengths[i])
            if extents and sum(extents[-1]) == first:
                extents[-1] = extents[-1][0], extents[-1][1] + n
            elif n:
                extents.append((first, n))
        return extents


def prefix_of(path: Path) -> Path:
    """PREFIX, also of PREFIX.bin or PREFIX.idx."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def read_index(prefix: Path) -> Index:
    """Open a pair of files.

    Raises:
        DataError: a file is missing, unreadable, truncated or of another format, or the two do not belong together.
    """
    idx, tokens = (prefix.parent / f"{prefix.name}.{end}" for end in ("idx", "bin"))
    if prefix.is_dir() and not idx.exists():
        inside = [str(file.with_suffix("")) for file in sorted(prefix.glob("*.idx"))[:3]]
        content = f"it has {', '.join(inside)}" if inside else "it has no .idx file"
        raise DataError(
            f"{prefix} is a folder; --from-megatron takes the common name of a .bin and an .idx file: {content}"
        )
    for file in (idx, tokens):
        if not file.is_file():
            problem = f"is {kind_of(file)}" if file.exists() else "does not exist"
            raise DataError(f"{file} {problem}; --from-megatron takes the common name of a .bin and an .idx file")
    try:
        size, bin_size = idx.stat().st_size, tokens.stat().st_size
        with idx.open("rb") as stream:
            header = stream.read(_HEADER.size)
        dtype, n_sequences, n_ends = _parse_header(idx, header, size)
        data = np.memmap(idx, mode="r")
    except OSError as error:
        raise DataError(f"{error.filename or idx} can't be read: {error.strerror or error}") from None
    at, arrays = _HEADER.size, []
    for kind, n in (("<i4", n_sequences), ("<i8", n_sequences), ("<i8", n_ends)):
        arrays.append(np.frombuffer(data, kind, n, at))
        at += arrays[-1].nbytes
    index = Index(tokens, dtype, *arrays)
    _require_inside(idx, index, bin_size)
    _require_division(idx, index)
    return index


def _parse_header(idx: Path, header: bytes, size: int) -> tuple[np.dtype[Any], int, int]:
    """The dtype, the number of sequences, and that of documents and 1."""
    if header.startswith(_LEGACY):
        raise DataError(f"{idx} has Megatron's old format TNTIDX; make the files again with preprocess_data.py")
    if not header.startswith(MAGIC):
        raise DataError(f"{idx} is not an index of Megatron: it begins with {header[:9]!r}, not with {MAGIC!r}")
    if len(header) < _HEADER.size:
        raise DataError(f"{idx} was truncated: it has {size:,} bytes, and its header alone has {_HEADER.size}")
    _, version, code, n_sequences, n_ends = _HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{idx} has version {version} of Megatron's format; version 1 can be read")
    if code not in DTYPES:
        meaning = f"{_FLOATS[code]}, which tokens can't be" if code in _FLOATS else "unknown"
        known = ", ".join(f"{number} ({name})" for number, name in DTYPES.items())
        raise DataError(f"{idx}: the dtype {code} is {meaning}; these can be read: {known}")
    expected = _HEADER.size + 12 * n_sequences + 8 * n_ends
    if n_sequences and size == expected + n_sequences:
        raise DataError(f"{idx} has a mode for each sequence: multimodal data can't be read, only text")
    if size != expected:
        problem = "was truncated or damaged" if size < expected else "is damaged, or has another format"
        raise DataError(
            f"{idx} {problem}: it has {size:,} bytes, but with {n_sequences:,} sequences and {n_ends:,} document "
            f"boundaries it would have {expected:,}"
        )
    return np.dtype(DTYPES[code]).newbyteorder("<"), n_sequences, n_ends


def _require_inside(idx: Path, index: Index, bin_size: int) -> None:
    """Check that each sequence is in the .bin file, and that the last one ends with it."""
    itemsize, last = index.dtype.itemsize, 0
    for first in range(0, len(index.lengths), _BLOCK):
        lengths = index.lengths[first : first + _BLOCK].astype(np.int64)
        pointers = index.pointers[first : first + _BLOCK]
        good = (lengths >= 0) & (pointers >= 0) & (pointers % itemsize == 0)
        good &= pointers <= bin_size - lengths * itemsize
        if not good.all():
            bad = int(np.argmin(good))
            raise DataError(
                f"{idx}: sequence {first + bad:,} has {int(lengths[bad]):,} tokens of {itemsize} bytes from byte "
                f"{int(pointers[bad]):,} on, but {index.bin} has {bin_size:,} bytes: one of the two was truncated or "
                "damaged, or they do not belong together"
            )
        last = max(last, int((pointers + lengths * itemsize).max()))
    if last != bin_size:
        raise DataError(
            f"{idx}: the last sequence ends at byte {last:,}, but {index.bin} has {bin_size:,} bytes: one of the two "
            "was truncated or damaged, or they do not belong together"
        )


def _require_division(idx: Path, index: Index) -> None:
    """Check that the documents divide the sequences."""
    ends = index.documents
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != len(index.lengths) or (np.diff(ends) < 0).any():
        raise DataError(
            f"{idx} is damaged, or has no documents: its {len(ends):,} document boundaries should increase from 0 to "
            f"{len(index.lengths):,}, the number of sequences"
        )
