"""What saving and loading take on each rank above the state itself, as docs/checkpoints.md says it."""

import ctypes
import gc
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpointing.reload_worker import WAYS, State, save_now
from tests.helpers import run_distributed
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.optim.optimizer import make_state

MIB = 2**20
SLACK = 12  # MiB: messages, JSON, the interpreter


def anonymous() -> int:
    """Bytes of this process that no file backs: what the kernel can't drop."""
    line = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert line is not None
    return 1024 * int(line[1])


def peak_of(action: Callable[[], object]) -> float:
    """MiB that an action takes at its highest, above what there was before, looked at every half millisecond."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed blocks that glibc keeps would hide what is allocated from them
    dist.barrier()
    before = peak = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        action()
    finally:
        done.set()
        thread.join()
    return (peak - before) / MIB


def measure(process: Process, folder: Path) -> dict[str, float]:
    state = State("2", 1, "wide", process)
    make_state(state.optimizer)
    peaks = {}

    for kind, api in WAYS:
        saver = state.checkpointer(folder / f"{kind} {api}", kind, api)
        save_now(saver)  # buffers that every later save finds
        peaks[f"save {kind} {api}"] = peak_of(partial(save_now, saver, 2))
        peaks[f"load {kind} {api}"] = peak_of(partial(saver.load, {}))
    peaks["gradients"] = sum(p.to_local().numel() for p in state.model.parameters()) * 4 / MIB  # type: ignore[attr-defined]
    return peaks


@pytest.mark.extended
def test_a_save_and_a_load_take_what_the_page_says(tmp_path: Path) -> None:
    """On each of two ranks."""
    measured = run_distributed(measure, 2, tmp_path)
    whole = 3 * 2 * measured[0]["gradients"]
    for peaks in measured:
        for api in ("dtensor", "dcp"):  # sharded states are written and read in place
            assert peaks[f"save sharded {api}"] < SLACK, peaks
            # making the optimizer's state takes gradients, as training does
            assert peaks[f"load sharded {api}"] < peaks["gradients"] + SLACK, peaks
        # one tensor at a time is gathered, or sent; a collective and the allocator have some of their own
        assert peaks["save full dtensor"] < 0.4 * whole, peaks
        assert peaks["load full dtensor"] < 0.4 * whole, peaks
    assert measured[0]["save full dcp"] > 0.8 * whole, "DCP gathers all of it, as the docs say"
