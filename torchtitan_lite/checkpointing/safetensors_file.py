"""Safetensors files that are written a tensor at a time, hashed while they are written, and on the disk when closed.

The library's own `save_file` wants all tensors at once, and leaves hashing and syncing to a second pass over the bytes.
The format is eight bytes with the length of a JSON header, the header, and the tensors' bytes without gaps.
"""

import contextlib
import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from torchtitan_lite.checkpointing import progress
from torchtitan_lite.errors import CheckpointError

WRITABLE = {  # the dtypes that a file may hold, and what safetensors calls them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CHUNK = 8 << 20  # bytes that are written, and handed to the hashing thread, at a time
_SYNC_EVERY = 4 << 30  # bytes; or all of a file could wait for its last sync, during which nothing is seen to move

TensorSpecs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # the tensors of a file: dtype and shape by name


def specs_of(tensors: Mapping[str, Tensor]) -> TensorSpecs:
    """What a file of these tensors holds."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


def _start_writeback(descriptor: int, start: int, n_bytes: int) -> None:
    """Have the kernel begin to write this now. Otherwise it begins at the sync, and the disk is idle until then.

    Linux starts writeback of dirty pages before it drops clean ones; elsewhere the advice may do nothing.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, start, n_bytes, os.POSIX_FADV_DONTNEED)


class HashingStream:
    """A file that is hashed by a thread of its own while it is written: both release the interpreter's lock.

    What is written must not change until `close` has returned.

    Args:
        ahead: how many chunks writing may be ahead of hashing, which keeps them in memory. 0: any number, for bytes
            that stay in memory anyway; then hashing can go on while the disk is waited for.
    """

    def __init__(self, path: Path, ahead: int = 2) -> None:
        self._file: BinaryIO = path.open("xb")
        self._bytes, self._synced, self._abandoned = 0, 0, False
        self._hash = hashlib.sha256()
        self._chunks: queue.Queue[memoryview | None] = queue.Queue(maxsize=ahead)
        self._thread = threading.Thread(target=self._digest, daemon=True)
        self._thread.start()

    def _digest(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            if not self._abandoned:
                self._hash.update(chunk)
                progress.advance(len(chunk))

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            self._chunks.put(chunk)
            self._file.write(chunk)
            _start_writeback(self._file.fileno(), self._bytes, len(chunk))
            self._bytes += len(chunk)
            progress.advance(len(chunk))
            if self._bytes - self._synced >= _SYNC_EVERY:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._synced = self._bytes

    def close(self) -> FileRecord:
        """Have the disk hold the file."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._end()
        return FileRecord(self._bytes, self._hash.hexdigest())

    def abandon(self) -> None:
        """Stop, after an error: what waits to be hashed is not."""
        self._abandoned = True
        self._end()

    def _end(self) -> None:
        self._chunks.put(None)
        self._thread.join()
        self._file.close()


def layout(tensors: TensorSpecs) -> tuple[bytes, list[str]]:
    """The header of a file with these tensors, and the order in which their bytes follow: large elements first, so
    that each is aligned."""
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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


class TensorFileWriter:
    """Writes one file. The specs of its tensors are known first; the tensors follow in `order`.

    Args:
        ahead: see HashingStream.

    Raises:
        OSError: as any writing does.
    """

    def __init__(self, path: Path, tensors: TensorSpecs, ahead: int = 2) -> None:
        header, self.order = layout(tensors)
        self._announced = iter([(name, *tensors[name]) for name in self.order])
        self._name = path.name
        self._stream = HashingStream(path, ahead)
        try:
            with progress.working(f"writing {self._name}"):
                self._stream.write(memoryview(header))
        except BaseException:
            self._stream.abandon()
            raise

    def write(self, tensor: Tensor) -> None:
        """The next tensor, on the CPU. It must not change until `close` has returned."""
        name, dtype, shape = next(self._announced)
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), f"{name} does not match its spec"
        with progress.working(f"writing {self._name}"):
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._stream.write(memoryview(flat.numpy()))  # type: ignore[arg-type]  # an array is a buffer

    def close(self) -> FileRecord:
        """Have the disk hold the whole file."""
        assert next(self._announced, None) is None, "tensors are missing"
        with progress.working(f"writing {self._name}"):
            return self._stream.close()

    def abandon(self) -> None:
        """Stop, after an error."""
        self._stream.abandon()


def write_tensors(path: Path, specs: TensorSpecs, tensor: Callable[[str], Tensor], ahead: int = 2) -> FileRecord:
    """Write a file of tensors, each of which is asked for when it is its turn; on the disk when this returns.

    Args:
        ahead: see HashingStream.
    """
    writer = TensorFileWriter(path, specs, ahead)
    try:
        for name in writer.order:
            writer.write(tensor(name))
    except BaseException:
        writer.abandon()
        raise
    return writer.close()


def write_text(path: Path, text: str) -> FileRecord:
    """A small file, on the disk when this returns."""
    stream = HashingStream(path)
    try:
        stream.write(memoryview(text.encode()))
    except BaseException:
        stream.abandon()
        raise
    return stream.close()


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes."""
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as stream:
        while n_bytes := stream.readinto(chunk):
            digest.update(chunk[:n_bytes])
            progress.advance(n_bytes)
    return digest.hexdigest()
