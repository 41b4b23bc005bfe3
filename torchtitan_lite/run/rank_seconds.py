"""Which rank is slow: the seconds in which each rank computes, without its waits for other ranks.

In the step before a logged one, each FSDP group is timed from the end of its unshard to its reshard, forward and
backward. So a slow GPU or a throttled host shows, which the time of a step does not: it is the same on all ranks.
"""

import contextlib
import functools
import itertools
import socket
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_lite.config.sections.log import Metric
from torchtitan_lite.distributed.exchange import values_of_ranks
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.optim.step_record import MOST_RANKS
from torchtitan_lite.run.metrics import Log, Meter


class RankSeconds:
    """Times a sharded model's computation, with a clock or a GPU's events. `metric` has the seconds of all ranks."""

    def __init__(self, model: nn.Module, process: Process, meter: Meter, log: Log) -> None:
        self._process, self._meter, self._log = process, meter, log
        self.metric = Metric(self._parts, self._values)
        self._on, self._slow = False, dict[int, int]()
        self._marks = self._before = list[tuple[bool, Any]]()  # of this step, and of the one before
        states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
        for group in {state._fsdp_param_group for state in states} - {None}:
            for name in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
                setattr(group, name, functools.partial(self._timed, getattr(group, name), name.startswith("pre")))

    def _timed(self, function: Any, begins: bool, *args: Any, **more: Any) -> Any:
        """Call a function of FSDP, which may wait for other ranks. Computation begins after it, or ends before it."""
        if self._on and not begins:
            self._marks.append((begins, self._now()))
        result = function(*args, **more)
        if self._on and begins:
            self._marks.append((begins, self._now()))
        return result

    def _now(self) -> Any:
        """Return an event on a GPU, else the seconds of a clock."""
        if self._process.device.type != "cuda":
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    @contextlib.contextmanager
    def step(self, *, timed: bool) -> Iterator[None]:
        """Forward and backward of a step."""
        self._before, self._marks, self._on = self._marks, [], timed
        yield
        self._on = False

    def _parts(self, *_: object, **__: object) -> Tensor:
        """Return (2, ranks): this rank's seconds in the step before, and of waiting for data since the last record.

        The host must have waited for the step before.
        """
        pairs = itertools.pairwise(self._before)
        spans = [(begun, ended) for (begins, begun), (more, ended) in pairs if begins and not more]
        on_gpu, rank = self._process.device.type == "cuda", self._process.rank
        seconds = sum(begun.elapsed_time(ended) / 1000 if on_gpu else ended - begun for begun, ended in spans)
        found = torch.zeros(2, self._process.world_size, dtype=torch.float64, device=self._process.device)
        for row, value in zip(found, (seconds, self._meter.parts.get("data_s", 0.0)), strict=True):
            row[rank : rank + 1].fill_(value)
        return found

    def _values(self, summed: Tensor) -> dict[str, Any]:
        """Return the ranks' seconds for metrics.jsonl; of more than MOST_RANKS, of the slowest three. Collective.

        On GPUs, logs a line about ranks that were 10 % slower than the median in five records in a row.
        """
        found = {
            key: each for key, each in zip(("rank_seconds", "rank_data_s"), summed.tolist(), strict=True) if any(each)
        }
        seconds = found.get("rank_seconds", [])
        limit = 1.1 * statistics.median(seconds or [0.0])
        slow = [rank for rank, each in enumerate(seconds) if each > limit]
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}
        if 5 in self._slow.values() and self._process.device.type == "cuda":
            hosts = values_of_ranks(socket.gethostname())
            named = ", ".join(f"rank {rank} ({hosts[rank]})" for rank in slow if self._slow[rank] == 5)
            self._log.info(f"SLOW    {named}: computed 10 % longer than the median rank in each of the last 5 records")
        if len(summed[0]) > MOST_RANKS:
            slowest = {key: sorted(enumerate(each), key=lambda pair: -pair[1])[:3] for key, each in found.items()}
            return {f"{key}/{rank}": each for key, pairs in slowest.items() for rank, each in pairs}
        return found
