"""Memory by the events of PyTorch's CPU allocator, which unlike a process's resident size are exact."""

import gc
import os
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


def peak_of(compute: Callable[[], object]) -> int:
    """The most bytes that `compute` holds beyond what was there before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler says on stderr that it starts and stops
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


def own_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's part of tensors; those that share memory, as a group's gradients do, are counted once."""
    own = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in own}.values())
