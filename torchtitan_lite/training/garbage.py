"""Python's garbage collector on a schedule."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def on_schedule(every: int) -> Iterator[None]:
    """Leave garbage to the loop, which calls gc.collect() every so many steps; 0 changes nothing.

    Left alone, Python collects whenever enough objects have been made: on another rank at another step, and all ranks
    wait for each of them. What exists now (torch's modules above all) is never looked at again, so that a collection
    takes milliseconds.
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
