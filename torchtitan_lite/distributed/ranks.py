"""Exchange values between ranks. An error on one rank is raised on all of them, so that none waits for it.

Values travel as JSON. torch's object collectives unpickle received data, which can run code.
"""

import contextlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite import errors

T = TypeVar("T")
# Marks a thread while it runs an action of `on_rank0`. The other ranks wait for the result, so a collective in the
# action would never end. Tests replace the mark by one under which a collective raises at once (tests/rank0.py).
mark: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def on_rank0(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run an action on the group's first rank; return its result on all ranks. A single rank just runs it.

    Args:
        action: must not contain a collective, because the other ranks would not take part.

    Raises:
        UserError: the action raised it; the other ranks raise one of the same class and text. After any other error on
            the first rank, they raise a StuckError.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        with mark:
            return action()
    if dist.get_rank(group) == 0:
        try:
            with mark:
                result = action()
            outcome = _to_bytes(["", result])
        except Exception as error:
            _broadcast(_to_bytes(_described(error)), group)
            raise
        _broadcast(outcome, group)
        return result
    kind, value = _from_bytes(_broadcast(None, group))
    if kind:
        raise _error(kind, value)
    return value


def on_all(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run an action on each rank of the group, and return all results on every rank.

    Raises:
        UserError: on every rank, with the texts of all failed ranks and the class of the first one's error (StuckError
            if that is not a UserError). A rank with a bug raises its own error, and so does a single rank.
    """
    cause, outcome = None, list[Any]()
    try:
        outcome = ["", action()]
    except Exception as error:
        cause, outcome = error, _described(error)
    of_ranks = gather(outcome, group)
    bug = not isinstance(cause, errors.UserError | OSError | MemoryError)
    if cause is not None and (bug or len(of_ranks) == 1):
        raise cause
    failed: dict[str, tuple[int, str]] = {}  # by text: the first rank that failed with it, and the class
    for rank, (kind, value) in enumerate(of_ranks):
        if kind:
            failed.setdefault(value, (rank, kind))
    if failed:
        texts = (text if text.startswith("rank ") else f"rank {rank}: {text}" for text, (rank, _) in failed.items())
        (_, kind), *_ = failed.values()
        raise _error(kind, "; ".join(texts)) from cause
    return [value for _, value in of_ranks]


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of the group, on every rank."""
    own = _to_bytes(value)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(own)], device="cpu"), group)
    longest = max(int(size) for size in sizes)
    data = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in sizes]
    dist.all_gather(data, torch.cat([own, own.new_zeros(longest - len(own))]), group)
    return [_from_bytes(each[: int(size)]) for each, size in zip(data, sizes, strict=True)]


def _broadcast(data: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
    """Return the first rank's bytes, on every rank. A few bytes take one message."""
    source = dist.get_global_rank(group, 0) if group else 0
    first = torch.zeros(64, dtype=torch.uint8, device="cpu")  # the size, and the data if there is room
    size, room = first[:8].view(torch.int64), first[8:]
    if data is not None:
        size.fill_(len(data))
        room[: len(data)] = data[: len(room)]
    dist.broadcast(first, source, group)
    if int(size) <= len(room):
        return room[: int(size)]
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.broadcast(data, source, group)
    return data


def _described(error: Exception) -> list[Any]:
    kind = type(error) if isinstance(error, errors.UserError) else errors.StuckError
    return [kind.__name__, errors.text_of(error)]


def _error(kind: str, text: str) -> errors.UserError:
    """Return the error that another rank sent by `_described`."""
    error: errors.UserError = getattr(errors, kind, errors.UserError)(text)
    error.secondary = True
    return error


def _to_bytes(value: Any) -> Tensor:
    text = json.dumps(value)
    # a tuple would arrive as a list, and the key 1 as "1"
    assert repr(json.loads(text)) == repr(value), f"JSON would change {value!r}"
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
