"""The progress of saves, loads and verifications on this rank, for the watchdog.

Their time depends on the bytes and the disk, so no fixed limit tells whether one hangs. Code that writes, hashes or
reads calls `advance` with the number of bytes. `doing` marks an operation that this rank takes part in. Within it,
`working` marks work that other ranks may be waiting for. A load also counts bytes that the kernel reads for
memory-mapped files.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path


@dataclass(frozen=True)
class Progress:
    """This process at one moment."""

    moved: int = 0  # bytes so far, and 1 for each start or end of an operation
    doing: list[str] = field(default_factory=list)  # the operation of each thread that has one
    working: list[str] = field(default_factory=list)  # of those, the threads that do not only wait for other ranks


_lock = threading.Lock()
_moved = 0
_by_thread: dict[int, list[tuple[str, bool]]] = {}  # outermost first
_loading = 0  # number of threads that load


def advance(n_bytes: int) -> None:
    """Add bytes that were written, hashed or read."""
    global _moved
    with _lock:
        _moved += n_bytes


@contextmanager
def doing(operation: str, *, waiting: bool = True) -> Iterator[None]:
    """This thread takes part in a long operation, such as "saving step 5"."""
    stack = _by_thread.setdefault(threading.get_ident(), [])
    stack.append((operation, waiting))
    advance(1)
    try:
        yield
    finally:
        stack.pop()
        advance(1)
        if not stack:
            del _by_thread[threading.get_ident()]


@contextmanager
def loading(operation: str) -> Iterator[None]:
    """The same, for a load."""
    global _loading
    with doing(operation):
        _loading += 1
        try:
            yield
        finally:
            _loading -= 1


# other ranks may be waiting for this thread, such as for "writing model.safetensors"
working = partial(doing, waiting=False)


def current() -> Progress:
    threads = [list(stack) for stack in list(_by_thread.values()) if stack]
    texts = [": ".join(operation for operation, _ in stack) for stack in threads]
    busy = [text for text, stack in zip(texts, threads, strict=True) if not stack[-1][1]]
    return Progress(_moved + (_read_by_kernel() if _loading else 0), texts, busy)


def main_is_doing() -> bool:
    """Whether the main thread takes part in a long operation."""
    return threading.main_thread().ident in _by_thread


def _read_by_kernel() -> int:
    """Bytes that the kernel has read from disks for this process; 0 if unknown."""
    try:
        line = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(line[1]) if line else 0
