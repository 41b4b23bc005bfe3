"""A barrier for processes of one machine: each sends its rank to the others, and waits for theirs (no busy waiting).

Each rank has a datagram socket with a name in Linux's abstract namespace. The kernel removes the name when the process
ends, which the others notice. Sending and receiving also order memory accesses, on every architecture: after the
barrier, all ranks read whatever any rank wrote to shared memory before it.
"""

import array
import select
import socket
from collections.abc import Callable

SLICE_S = 0.2  # the time between two checks of the other ranks


class Barrier:
    """One rank's view.

    Args:
        name: the same for all ranks, and for nobody else on this machine.
        check: called with the seconds waited so far, about every SLICE_S. Raises an error to give up.

    Raises:
        OSError: the system has no such sockets.
    """

    def __init__(self, name: str, rank: int, size: int, check: Callable[[float], None]) -> None:
        self._names, self._rank, self._check = [f"\0{name}-{other}" for other in range(size)], rank, check
        self._arrivals = [0] * size  # how often each rank has come to the barrier, as far as this one knows
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._names[rank])
        self._socket.setblocking(False)

    def share(self, file: int) -> None:
        """Send an open file to all ranks, this one included. They have to `take` it before any of them waits."""
        for name in self._names:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
            self._socket.sendmsg([b" "], rights, 0, name)

    def take(self) -> int:
        """Return the file that a rank has shared."""
        _, (file,), *_ = socket.recv_fds(self._socket, 1, 1)
        return file

    def wait(self) -> None:
        """Wait for all ranks."""
        self._arrivals[self._rank] += 1
        waited_s = 0.0  # sum of slices, so that time in which this process is suspended does not count
        unsent = [rank for rank in range(len(self._names)) if rank != self._rank]
        while unsent or self.absent():
            unsent = [rank for rank in unsent if not self._sent(rank)]
            try:
                self._arrivals[self._socket.recv(1)[0]] += 1
            except BlockingIOError:
                slice_s = 0.001 if unsent else SLICE_S  # nothing tells when a full queue of another rank has room
                if not select.select([self._socket], [], [], slice_s)[0]:
                    waited_s += slice_s
                    self._check(waited_s)

    def absent(self) -> list[int]:
        """Return the ranks that have not arrived at the barrier where this one waits."""
        return [rank for rank, number in enumerate(self._arrivals) if number < self._arrivals[self._rank]]

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank's process has ended."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            return probe.connect_ex(self._names[rank]) != 0

    def _sent(self, rank: int) -> bool:
        try:
            self._socket.sendto(bytes([self._rank]), self._names[rank])
        except BlockingIOError:  # too many wait there
            return False
        except ConnectionRefusedError:  # it has ended, which `check` will find
            pass
        return True
