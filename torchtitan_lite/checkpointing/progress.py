"""What this process does that may take long, and how far it is. The watchdog (watchdog.py) reads it, on every rank.

Saves, loads and verifications take as long as there are bytes, so no fixed time says whether one hangs. Whoever writes,
hashes or reads calls `advance` with the bytes. `doing` marks what a rank takes part in, and within it `working` what
other ranks may be waiting for. Memory-mapped files are read by whoever touches them first; while a rank loads, what the
kernel reads for this process therefore counts too. (While it trains it does not: that may be the next batch.)
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """A process at one moment."""

    moved: int = 0  # bytes so far, and one for each change of what it does
    doing: list[str] = field(default_factory=list)  # of each thread that does something
    working: list[str] = field(default_factory=list)  # of each thread that does not only wait for other ranks


_lock = threading.Lock()
_moved = 0
_by_thread: dict[int, list[tuple[str, bool]]] = {}  # outermost first
_loading = 0  # how many threads load


def advance(n_bytes: int) -> None:
    """So many bytes more are written, hashed or read."""
    global _moved
    with _lock:
        _moved += n_bytes


@contextmanager
def doing(what: str, *, waiting: bool = True) -> Iterator[None]:
    """This thread takes part in something that may take long, such as "saving step 5"."""
    mine = _by_thread.setdefault(threading.get_ident(), [])
    mine.append((what, waiting))
    advance(1)
    try:
        yield
    finally:
        mine.pop()
        advance(1)
        if not mine:
            del _by_thread[threading.get_ident()]


@contextmanager
def loading(what: str) -> Iterator[None]:
    """The same, for what does nothing but read."""
    global _loading
    with doing(what):
        _loading += 1
        try:
            yield
        finally:
            _loading -= 1


def working(what: str) -> AbstractContextManager[None]:
    """This thread does what other ranks may be waiting for, such as "writing model.safetensors"."""
    return doing(what, waiting=False)


def within(what: str, action: Callable[[], T]) -> Callable[[], T]:
    """The action, done while `working` on it."""

    def done() -> T:
        with working(what):
            return action()

    return done


def current() -> Progress:
    """Where this process is."""
    threads = [list(stack) for stack in list(_by_thread.values()) if stack]
    texts = [": ".join(what for what, _ in stack) for stack in threads]
    busy = [text for text, stack in zip(texts, threads, strict=True) if not stack[-1][1]]
    return Progress(_moved + (_read_by_kernel() if _loading else 0), texts, busy)


def _read_by_kernel() -> int:
    """Bytes that the kernel has fetched from disks for this process; 0 where nobody says."""
    try:
        found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
