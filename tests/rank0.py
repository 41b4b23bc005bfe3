"""A mark for `exchange.on_rank0`: a collective of a marked thread raises at once, instead of waiting forever.

With one rank too, where a collective returns. conftest and the server of forked ranks install it.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_lite.cpu.barrier import Barrier
from torchtitan_lite.distributed import exchange

# what no operator of torch tells: the start of a group or mesh, shared memory, and a gather from a single rank
OTHERS = (dist, "new_group"), (DeviceMesh, "__init__"), (Barrier, "wait"), (DTensor, "redistribute")


class CollectiveError(AssertionError):
    """A collective began in an action that only rank 0 runs."""


class Refusing(TorchDispatchMode):
    """Refuses collectives of this thread, whoever calls them: dist, DTensor or FSDP2."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise CollectiveError(f"{func}: only rank 0 runs this action")
        return func(*args, **(kwargs or {}))


class Mark(threading.local):
    """See `exchange.mark`. Another `on_rank0` inside is refused: with several ranks, it is a collective."""

    refusing: Refusing | None = None

    def __enter__(self) -> None:
        self.refuse("on_rank0")
        self.refusing = Refusing()  # type: ignore[no-untyped-call]
        self.refusing.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        assert self.refusing is not None
        self.refusing.__exit__(*error)  # type: ignore[no-untyped-call]
        self.refusing = None

    def refuse(self, what: str) -> None:
        if self.refusing is not None:
            raise CollectiveError(f"{what}: only rank 0 runs this action")


def install() -> None:
    """Put the mark in place, once in a process."""
    if not isinstance(exchange.mark, Mark):
        exchange.mark = mark = Mark()
        for owner, name in OTHERS:
            setattr(owner, name, _refused(mark, getattr(owner, name)))


def _refused(mark: Mark, honest: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(honest)
    def collective(*args: Any, **kwargs: Any) -> Any:
        mark.refuse(honest.__qualname__)
        return honest(*args, **kwargs)

    return collective
