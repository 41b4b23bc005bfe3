"""Tracks what this process is doing and how many bytes it moved, for the watchdog.

Saves, loads and compilations may take any time, so no fixed limit tells whether one hangs. Code that writes, hashes or
reads calls `advance` with the number of bytes. `doing` marks an operation that this rank takes part in. Within it,
`working` marks work that other ranks may be waiting for.
"""

import contextlib
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

_COMPILERS = "/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py"
_lock = threading.Lock()
_bytes = 0
_by_thread: dict[int, list[tuple[str, bool]]] = {}  # outermost first


def advance(n_bytes: int) -> None:
    """Count bytes that were written, hashed or read."""
    global _bytes
    with _lock:
        _bytes += n_bytes


@contextlib.contextmanager
def doing(operation: str, *, waiting: bool = True) -> Iterator[None]:
    """Mark that this thread takes part in a long operation, such as "saving step 5"."""
    stack = _by_thread.setdefault(threading.get_ident(), [])
    stack.append((operation, waiting))
    try:
        yield
    finally:
        stack.pop()
        if not stack:
            del _by_thread[threading.get_ident()]


# marks work of this rank, such as "writing model.safetensors", that other ranks may be waiting for
working = partial(doing, waiting=False)


def operations() -> list[tuple[str, bool]]:
    """Return each thread's operation, and whether the thread works (true) or waits for other ranks (false)."""
    stacks = [list(stack) for stack in list(_by_thread.values())]
    return [(": ".join(operation for operation, _ in stack), not stack[-1][1]) for stack in stacks if stack]


def moved() -> int:
    """Return the bytes written, hashed or read so far."""
    return _bytes + _read_by_kernel()


def _read_by_kernel() -> int:
    """Return the bytes that the kernel read from disks for this process, e.g. memory-mapped files; 0 if unknown."""
    try:
        line = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(line[1]) if line else 0


def compiles() -> bool:
    """Return whether a thread of this process is compiling a block."""
    stacks = map(traceback.walk_stack, sys._current_frames().values())
    return any(frame.f_code.co_filename.endswith(_COMPILERS) for stack in stacks for frame, _ in stack)


def processor_s() -> float:
    """Return the processor time of this process and its descendants, such as compilers, in seconds."""
    parents, ticks = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = file.read_text().rpartition(")")[2].split()  # man 5 proc; from the third field on
            number = int(file.parent.name)
            parents[number], ticks[number] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {os.getpid()}
    while more := {number for number, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(number, 0) for number in family) / os.sysconf("SC_CLK_TCK")
