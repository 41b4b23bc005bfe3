"""Exact memory figures, from the events of PyTorch's CPU allocator."""

import gc
import os
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


def peak_of(compute: Callable[[], object]) -> int:
    """The peak of bytes that `compute` allocates on top of what exists."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler
    gc.collect()  # garbage freed during `compute` would be subtracted
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
    """Bytes of this rank's shards. Shared storage, such as that of a group's gradients, is counted once."""
    own = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in own}.values())
