"""Memory by the events of PyTorch's CPU allocator, which unlike a process's resident size are exact."""

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_of(compute: Callable[[], object]) -> int:
    """The most bytes that `compute` holds beyond what was there before."""
    gc.collect()  # what is freed in between would be subtracted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        compute()
    assert trace.profiler is not None
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
