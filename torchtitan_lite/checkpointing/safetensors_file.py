"""Writes safetensors files one tensor at a time, hashes them meanwhile, and syncs them to disk on close.

The library's `save_file` needs all tensors at once, and hashing would need a second pass. Format: 8 bytes with the
length of a JSON header, the header, and the tensors' bytes without gaps.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from torchtitan_lite import progress
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.files import flush_to_disk, naming, write_durably

WRITABLE = {  # the supported dtypes, and their names in the file
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in WRITABLE.items()}
_CHUNK = 8 << 20  # bytes written and hashed at a time
PIECE = 64 << 20  # bytes copied from a GPU at a time
_SYNC_EVERY = 4 << 30  # bytes; the watchdog would see no progress during one long sync at the end

TensorSpecs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # by name: dtype and shape


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of known dtypes and shapes, made on access."""

    def __init__(self, specs: TensorSpecs, make: Callable[[str], Tensor]) -> None:
        self.specs, self._make = specs, make

    def __getitem__(self, name: str) -> Tensor:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def specs_of(tensors: Mapping[str, Tensor]) -> TensorSpecs:
    """Return dtypes and shapes, without reading lazy tensors."""
    if isinstance(tensors, LazyTensors):
        return tensors.specs
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class FileRecord:
    """The manifest's entry for a file."""

    bytes: int
    sha256: str


def _start_writeback(descriptor: int, start: int, n_bytes: int) -> None:
    """Ask the kernel to write these bytes now, not at the sync. (Linux does; no effect elsewhere.)"""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, start, n_bytes, os.POSIX_FADV_DONTNEED)


def header_of(tensors: TensorSpecs, metadata: Mapping[str, str] | None) -> tuple[bytes, list[str]]:
    """Return the header of a file, and the order of its tensors: large elements first, for alignment."""
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        if dtype not in WRITABLE:
            raise CheckpointError(f"{name} has the dtype {dtype}, which a checkpoint can't hold")
        start, end = end, end + dtype.itemsize * int(torch.Size(shape).numel())
        header[name] = {"dtype": WRITABLE[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


class TensorWriter:
    """Writes a file tensor by tensor, in the order of `names`. The first tensor opens it.

    A second thread hashes it meanwhile. Both threads release the GIL.

    Args:
        metadata: entries of the header besides the tensors.
    """

    def __init__(self, path: Path, specs: TensorSpecs, metadata: Mapping[str, str] | None = None) -> None:
        self._path, self._specs = path, specs
        self._header, self.names = header_of(specs, metadata)
        self._file: BinaryIO | None = None
        self._bytes, self._synced = 0, 0
        self._hash, self._thread = hashlib.sha256(), ThreadPoolExecutor(1)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the next tensors. Their memory may change afterwards."""
        with progress.working(f"writing {self._path.name}"):
            for name, tensor in tensors.items():
                whole = tensor.detach().contiguous()
                assert (whole.dtype, tuple(whole.shape)) == self._specs[name], f"{name} does not match its spec"
                for piece in whole.reshape(-1).view(torch.uint8).split(PIECE):
                    self.write(memoryview(piece.cpu().numpy()))

    def write(self, data: memoryview) -> None:
        """Write and hash the next bytes."""
        file, chunks = self._opened(), [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]
        hashed = self._thread.map(self._digest, chunks)
        for chunk in chunks:
            with naming(self._path):
                file.write(chunk)
            _start_writeback(file.fileno(), self._bytes, len(chunk))
            self._bytes += len(chunk)
            progress.advance(len(chunk))
            if self._bytes - self._synced >= _SYNC_EVERY:
                flush_to_disk(file)
                self._synced = self._bytes
        list(hashed)  # waits

    def _digest(self, chunk: memoryview) -> None:
        self._hash.update(chunk)
        progress.advance(len(chunk))

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = self._path.open("xb")
            self.write(memoryview(self._header))
        return self._file

    def close(self) -> FileRecord:
        """Sync to disk, and return size and hash. The `with` block closes the file."""
        with progress.working(f"writing {self._path.name}"):
            flush_to_disk(self._opened())
        return FileRecord(self._bytes, self._hash.hexdigest())

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        if self._file is not None:
            with naming(self._path):  # closing retries a failed write
                self._file.close()


def write_tensors(
    path: Path,
    specs: TensorSpecs,
    tensor: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write a file, and sync it to disk. Calls `tensor` with each name just before writing it."""
    with TensorWriter(path, specs, metadata) as writer:
        for name in writer.names:
            writer.add({name: tensor(name)})
        return writer.close()


def write_text(path: Path, text: str) -> FileRecord:
    """Write a small file, and sync it to disk."""
    content = text.encode()
    write_durably(path, content)
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as stream:
        while n_bytes := stream.readinto(chunk):
            digest.update(chunk[:n_bytes])
            progress.advance(n_bytes)
    return digest.hexdigest()
