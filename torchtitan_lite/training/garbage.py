"""Garbage collection on a schedule."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def on_schedule(every: int) -> Iterator[None]:
    """Disable automatic collection: the loop calls gc.collect() itself. `every` = 0 changes nothing.

    Automatic collection happens at a different step on each rank, and all ranks wait for each one. Existing objects
    (mostly torch's modules) are frozen, so a collection takes milliseconds.
    """
    if not every:
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
