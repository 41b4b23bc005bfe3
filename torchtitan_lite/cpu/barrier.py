"""A barrier for processes that share memory, built on POSIX semaphores in that memory (no busy waiting).

    gate of rank 0 | gate of rank 1 | ... | turnstile | number of ranks that have arrived        64 bytes each

An arriving rank increments the number and waits at its gate. The last one resets the number to 0 and opens the other
gates. The turnstile lets one rank at a time change the number. Semaphores also order memory accesses, on every
architecture: after the barrier, all ranks read whatever any rank wrote before it. Each rank counts its barriers in the
last 8 bytes of its gate, so that an error can name the ranks that have not arrived.
"""

import ctypes
import errno
import os
import time
from collections.abc import Callable
from typing import Any

_BYTES = 64  # a cache line; Linux's sem_t has 32 bytes at most
SLICE_S = 0.2  # the time between two checks of the other ranks


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Barrier:
    """One rank's view.

    Args:
        address: start of `n_bytes(size)` bytes that all ranks have mapped; 64-byte aligned.
        check: called with the seconds waited so far, about every SLICE_S. Raises an error to give up.

    Raises:
        OSError, AttributeError: the system has no process-shared semaphores.
    """

    def __init__(self, address: int, rank: int, size: int, check: Callable[[float], None]) -> None:
        self._library: Any = ctypes.CDLL(None, use_errno=True)
        places = [ctypes.c_void_p(address + i * _BYTES) for i in range(size + 2)]
        *gates, self._turnstile, _ = places
        self._gate, self._others = gates[rank], [gate for i, gate in enumerate(gates) if i != rank]
        self._arrived = ctypes.c_int64.from_address(address + (size + 1) * _BYTES)
        ends = (address + (i + 1) * _BYTES - 8 for i in range(size))
        self._counts, self._rank = [ctypes.c_int64.from_address(end) for end in ends], rank
        self._size, self._check = size, check

    def initialise(self) -> None:
        """Create the semaphores. One rank calls it once, before any rank waits."""
        self._arrived.value = 0
        for place, value in ((self._turnstile, 1), (self._gate, 0), *((gate, 0) for gate in self._others)):
            if self._library.sem_init(place, 1, value):
                raise OSError(ctypes.get_errno(), f"sem_init: {os.strerror(ctypes.get_errno())}")

    def wait(self) -> None:
        """Wait for all ranks."""
        self._counts[self._rank].value += 1
        self._acquire(self._turnstile)
        self._arrived.value += 1
        last = self._arrived.value == self._size
        if last:
            self._arrived.value = 0
        self._library.sem_post(self._turnstile)
        if last:
            for gate in self._others:
                self._library.sem_post(gate)
        else:
            self._acquire(self._gate)

    def absent(self) -> list[int]:
        """Return the ranks that have not arrived at the barrier where this one waits."""
        return [rank for rank, count in enumerate(self._counts) if count.value < self._counts[self._rank].value]

    def _acquire(self, semaphore: Any) -> None:
        waited_s = 0.0  # sum of slices, so that time in which this process is suspended does not count
        while not self._acquired_in_time(semaphore):
            waited_s += SLICE_S
            self._check(waited_s)

    def _acquired_in_time(self, semaphore: Any) -> bool:
        until = time.time() + SLICE_S  # if the clock is set back, the next check is late
        timespec = _Timespec(int(until), int(until % 1 * 1e9))
        while self._library.sem_timedwait(semaphore, ctypes.byref(timespec)):
            if ctypes.get_errno() == errno.ETIMEDOUT:
                return False
            if ctypes.get_errno() != errno.EINTR:  # EINTR: Python now runs a signal handler
                raise OSError(ctypes.get_errno(), "waiting for a semaphore")
        return True


def n_bytes(size: int) -> int:
    """Return the bytes that a barrier of `size` ranks needs."""
    return (size + 2) * _BYTES
