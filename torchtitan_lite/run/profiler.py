"""Profiles some steps: a trace per rank, for ui.perfetto.dev or chrome://tracing, and a table of operators."""

import os
from pathlib import Path

import torch
from torch.profiler import profile

from torchtitan_lite.config.schema import ProfileConfig
from torchtitan_lite.distributed.process_group import Process

_ROWS = 25
_EVENTS = 200_000  # of the CUDA allocator, in a memory snapshot


class Profile:
    """Profiles the steps in `[profile] steps`; does nothing at others."""

    def __init__(self, config: ProfileConfig, folder: Path, process: Process) -> None:
        self._first, self._last = config.steps
        self._folder, self._rank, self._on_gpu = folder / "profile", process.rank, process.device.type == "cuda"
        self._snapshot = config.memory_snapshot and self._on_gpu
        self._running: profile | None = None

    def start(self, step: int) -> None:
        if step == self._first:
            if self._snapshot:
                torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs its start and stop to stderr
            self._running = profile()
            self._running.start()

    def stop(self, step: int, *, last: bool = False) -> str:
        """Stop after the last step to profile, or at the run's `last` step. Returns a line for the log, or ""."""
        if self._running is None or not (step == self._last or last):
            return ""
        trace, self._running = self._running, None
        trace.stop()
        try:
            self._folder.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(self._folder / f"rank-{self._rank}.json.gz"))
            by = "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total"
            table = trace.key_averages().table(sort_by=by, row_limit=_ROWS, max_name_column_width=60)
            (self._folder / f"operators-rank-{self._rank}.txt").write_text(table, encoding="utf-8")
            if self._snapshot:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-rank-{self._rank}.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
        except OSError as error:
            return f"profile {self._folder} can't be written: {error}; training continues"
        return (
            f"profile steps {self._first} to {step} are in {self._folder}: rank-N.json.gz for ui.perfetto.dev, "
            "operators-rank-N.txt"
        )
