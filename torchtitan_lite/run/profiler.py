"""Profiles some steps: a trace of some ranks, for ui.perfetto.dev or chrome://tracing, and a table of operators."""

import os
from pathlib import Path

import torch
from torch.profiler import profile

from torchtitan_lite.config.schema import ProfileConfig
from torchtitan_lite.distributed.process_group import Process

_ROWS = 25
_MACHINES = 8
_EVENTS = 200_000  # of the CUDA allocator, in a memory snapshot


class Profile:
    """Profiles the steps in `[profile] steps` on some ranks; does nothing at others. Built before the model.

    For a memory snapshot, CUDA's allocator keeps the stack of each live block from then on, so that the blocks of
    parameters and moments have one. In the profiled steps it keeps the stack of every event, and afterwards none.
    """

    def __init__(self, config: ProfileConfig, folder: Path, process: Process) -> None:
        self._first, self._last = config.steps
        self._ranks = config.ranks or range(0, process.world_size, process.local_world_size)[:_MACHINES]
        self._folder, self._rank, self._on_gpu = folder / "profile", process.rank, process.device.type == "cuda"
        self._snapshot = config.memory_snapshot and self._on_gpu and self._rank in self._ranks
        self._active = False  # between the first and the last step, also on a rank without a trace
        if self._snapshot:
            torch.cuda.memory._record_memory_history("state", context="state", stacks="python", max_entries=1)

    def start(self, step: int) -> None:
        """Start at the first step to profile."""
        if step == self._first:
            self._active = True
            if self._snapshot:
                torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
            if self._rank in self._ranks:
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs its start and stop to stderr
                self._trace = profile()
                self._trace.start()
        elif step > self._first and not self._active:
            self._end_history()  # of a resume behind that step

    def stop(self, step: int, *, last: bool = False) -> str:
        """Stop after the last step to profile, or at the run's `last` step. Returns a line for the log, or ""."""
        if not self._active or not (step == self._last or last):
            return ""
        self._active = False
        try:
            if self._rank in self._ranks:
                self._write()
        except OSError as error:
            return f"profile {self._folder} can't be written: {error}; training continues"
        finally:
            self._end_history()
        return (
            f"profile steps {self._first} to {step} are in {self._folder}: rank-N.json.gz for ui.perfetto.dev, "
            f"operators-rank-N.txt (N = {', '.join(map(str, self._ranks))})"
        )

    def _write(self) -> None:
        self._trace.stop()
        self._folder.mkdir(exist_ok=True)
        self._trace.export_chrome_trace(str(self._folder / f"rank-{self._rank}.json.gz"))
        by = "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total"
        table = self._trace.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=60)
        (self._folder / f"operators-rank-{self._rank}.txt").write_text(table, encoding="utf-8")
        if self._snapshot:
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-rank-{self._rank}.pickle"))

    def _end_history(self) -> None:
        if self._snapshot:
            self._snapshot = False
            torch.cuda.memory._record_memory_history(enabled=None)
