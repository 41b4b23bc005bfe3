"""Tell whether a communication error means a dead or late rank, and replace gloo's and NCCL's messages."""

import contextlib
import re
from collections.abc import Callable, Iterator

import torch.distributed as dist

from torchtitan_lite.environment import env_int
from torchtitan_lite.errors import StuckError

# Error texts of gloo, the store and NCCL when another process is gone or late. (The store and NCCL mostly raise
# DistError.)
_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "remote process exited",
)
_LATE = (
    "application timeout caused pair closure",
    "socket timeout",
    "timed out waiting",
    "timed out in monitoredbarrier",
    "operation timed out!",
    "connect timeout",
    "read timeout",
    "write timeout",
    "wait timeout",
    "timeout waiting for key",
    "collective operation timeout",
)
# NCCL errors that concern only this rank: wrong use, such as two ranks on one GPU, or a failed CUDA call
_LOCAL = "ncclinvalidusage", "ncclinvalidargument", "ncclunhandledcudaerror"

KILLED = (
    "If that process printed no error, it was killed; dmesg on its machine shows whether the kernel's OOM killer did it"
)


def means_lost_rank(error: RuntimeError) -> bool:
    """Return whether an error means that another rank is gone or late."""
    text = str(error).lower()
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "triton")):
        return False  # a compiler's error may quote code with these phrases, and its workers' pipes can break
    if isinstance(error, dist.DistError):
        return not any(phrase in text for phrase in _LOCAL)
    return any(phrase in text for phrase in _GONE + _LATE)


@contextlib.contextmanager
def explaining_lost_ranks(
    where: Callable[[], str] = lambda: "starting", reason: Callable[[], str] = lambda: f"a process died. {KILLED}"
) -> Iterator[None]:
    """Turn a communication error in this context into a StuckError.

    Args:
        where: returns what this rank does.
        reason: returns why a connection was closed (an error may also be a timeout). By default, no Watchdog knows it.
    """
    try:
        yield
    except RuntimeError as error:
        if env_int("WORLD_SIZE", 1) == 1 or not means_lost_rank(error):
            raise
        text = str(error).lower()
        closed = any(phrase in text for phrase in _GONE) or not any(phrase in text for phrase in _LATE)
        why = f"connection reset: {reason()}." if closed else "timed out waiting for the other ranks."
        first = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0])  # without gloo's source location and advice
        first = first.partition(". This is typically caused")[0]
        stuck = StuckError(f"rank {env_int('RANK', 0)}, {where()}: {why} ({first})")
        stuck.secondary = closed
        raise stuck from error
