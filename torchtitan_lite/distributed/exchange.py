"""Exchange values between ranks. An error on one rank is raised on all of them, so that none waits for it.

Values travel as JSON, because torch's object collectives unpickle received data, which can run code. Every rank gets
what JSON makes of a value, also the one that sent it: a tuple becomes a list, a dataclass a dict of its fields.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite import errors


def on_rank0(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Run an action on the group's first rank; return its result on all ranks. A single rank just runs it.

    Args:
        action: must not contain a collective, because the other ranks would not take part.

    Raises:
        UserError: the action raised it; the other ranks raise one of the same class and text. After any other error on
            the first rank, they raise a StuckError.
    """
    several = dist.is_initialized() and dist.get_world_size(group) > 1
    outcome, cause = "-", None  # on the other ranks, until the first one's arrives
    if not several or dist.get_rank(group) == 0:
        outcome, cause = _run(action)
    if several:
        outcome = _broadcast(outcome, group)
    if cause is not None:
        raise cause
    kind, value = json.loads(outcome)
    if kind:
        raise _error(kind, value)
    return value


def on_all(action: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Run an action on each rank of the group, and return all results on every rank.

    Raises:
        UserError: on every rank, with the texts of all failed ranks and the class of the first one's error (StuckError
            if that is not a UserError). A rank with a bug raises its own error, and so does a single rank.
    """
    outcome, cause = _run(action)
    of_ranks = _gather(outcome, group)
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


def values_of_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of the group, on every rank."""
    return _gather(json.dumps(value, default=asdict), group)


def _run(action: Callable[[], Any]) -> tuple[str, Exception | None]:
    """Run an action. Returns ["", its result], or the class and the text of its error, as JSON; and the error."""
    try:
        return json.dumps(["", action()], default=asdict), None
    except Exception as error:
        kind = type(error) if isinstance(error, errors.UserError) else errors.StuckError
        return json.dumps([kind.__name__, errors.text_of(error)]), error


def _error(kind: str, text: str) -> errors.UserError:
    """Return the error that another rank sent."""
    error: errors.UserError = getattr(errors, kind, errors.UserError)(text)
    error.secondary = True
    return error


def _broadcast(text: str, group: dist.ProcessGroup | None) -> str:
    """Return the first rank's text, on every rank."""
    source, data = dist.get_global_rank(group, 0) if group else 0, _bytes_of(text)
    size = torch.tensor([len(data)], device="cpu")
    dist.broadcast(size, source, group)
    if dist.get_rank(group):
        data = data.new_empty(int(size))
    dist.broadcast(data, source, group)
    return data.numpy().tobytes().decode()


def _gather(text: str, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks' JSON, on every rank."""
    own = _bytes_of(text)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(own)], device="cpu"), group)
    longest = max(int(size) for size in sizes)
    data = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in sizes]
    dist.all_gather(data, torch.cat([own, own.new_zeros(longest - len(own))]), group)
    return [json.loads(each[: int(size)].numpy().tobytes()) for each, size in zip(data, sizes, strict=True)]


def _bytes_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
