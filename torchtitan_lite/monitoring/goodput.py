"""Goodput: the share of the time since a run's first launch in steps that counted. And where the rest went.

A clock adds up the seconds of an attempt by kind. Two kinds of record keep its sums: `spent` in metrics.jsonl, in each
log line's record and in one before each save, and `goodput` in run.json, at the start and the end of an attempt. They
include all attempts before. So an attempt that resumes after a kill knows how much time the steps up to its checkpoint
took, and how much the steps after it, which it repeats. Only rank 0's sums are written.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.monitoring import records
from torchtitan_lite.terminal import duration

KINDS = {
    "steps": "steps that counted",
    "repeated": "steps repeated",
    "start": "start: imports, data, process group, model",
    "load": "loading checkpoints",
    "save": "waiting for saves",
    "evaluation": "validation, tasks, samples",
    "other": "logging, profiler, garbage collection",
    "idle": "between attempts",
}
_LONGEST_S = 1e10  # above any run, and any time of today: such a figure was not measured
_NOT_SET_S = 1.7e9  # a clock that shows 2023 or earlier was not set when this was written


class Clock:
    """Counts seconds by kind, from the start of this process on. One kind at a time, so they add up to the whole."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, age_s: float | None = None) -> None:
        self._now = now
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.seconds["start"] = process_age_s() if age_s is None else age_s
        self._kind, self._since = "start", now()

    def enter(self, kind: str) -> str:
        """From now on, time is of this kind. Returns the kind until now."""
        now, before = self._now(), self._kind
        self.seconds[before] += now - self._since
        self._kind, self._since = kind, now
        return before

    @contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """The time in this context is of this kind."""
        before = self.enter(kind)
        try:
            yield
        finally:
            self.enter(before)

    def spent(self) -> dict[str, float]:
        """The seconds by kind so far, without those that are 0. Called by other threads, too."""
        running = {self._kind: self._now() - self._since}
        return {k: round(s, 3) for k, v in self.seconds.items() if (s := v + running.get(k, 0.0))}

    def continue_run(self, folder: Path, about: Mapping[str, Any], step: int) -> None:
        """Add the attempts before this one, which resumes from `step`, and the time since the last of them.

        Args:
            about: the content of run.json.
        """
        marks = _marks(folder, about)
        if not marks:
            return
        last = max(marks, key=lambda mark: total(mark.seconds))
        past = _back_to(last.seconds, _steps_s(marks, step))
        launched = time.time() - total(self.spent())
        # a clock may have been set in between, or back
        idle = launched - last.time if last.time > _NOT_SET_S else 0.0
        past["idle"] = past.get("idle", 0.0) + max(idle, 0.0)
        for kind, seconds in past.items():
            self.seconds[kind] += seconds


class _Mark(NamedTuple):
    """The sums at a step, and when they were written, in seconds since the epoch."""

    step: int
    time: float
    seconds: dict[str, float]


def _marks(folder: Path, about: Mapping[str, Any]) -> list[_Mark]:
    """The sums that a run has written. What is damaged is left out."""
    found = []
    sums = about.get("goodput")  # with a time of its own: run.json's is renewed by attempts that have no sums
    when = sums.get("time") if isinstance(sums, dict) else None
    ends = {"step": about.get("step"), "time": when, "spent": _of_about(about)}
    for record in [*records.read(folder / "metrics.jsonl"), ends]:
        seconds, step, when = seconds_of(record.get("spent")), record.get("step"), record.get("time")
        if seconds and type(step) is int and isinstance(when, int | float) and 0 <= when < _LONGEST_S:
            found.append(_Mark(step, when, seconds))
    return found


def _steps_s(marks: list[_Mark], step: int) -> float:
    """The time of the steps that counted up to this one."""
    before = [mark.seconds for mark in marks if mark.step <= step]
    return max(before, key=total, default={}).get("steps", 0.0)


def total(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values())


def _back_to(seconds: Mapping[str, float], steps_s: float) -> dict[str, float]:
    """The sums after going back to a step: what its later steps took is `repeated`."""
    lost = max(seconds.get("steps", 0.0) - steps_s, 0.0)
    counted, repeated = seconds.get("steps", 0.0) - lost, seconds.get("repeated", 0.0) + lost
    return {**seconds, "steps": counted, "repeated": repeated}


def seconds_of(value: Any) -> dict[str, float]:
    """The seconds by kind of a record; empty if it was not written by a clock."""
    if not isinstance(value, dict):
        return {}
    known = {kind: value[kind] for kind in KINDS if kind in value}
    fine = all(type(s) in (int, float) and 0 <= s <= _LONGEST_S for s in known.values())
    return {kind: float(s) for kind, s in known.items()} if fine else {}


def newest(about: Mapping[str, Any], found: list[dict[str, Any]]) -> dict[str, float]:
    """The last sums of a run.

    Args:
        about: the content of run.json.
        found: records of metrics.jsonl.
    """
    return max((seconds_of(sums) for sums in [_of_about(about), *(r.get("spent") for r in found)]), key=total)


def _of_about(about: Mapping[str, Any]) -> Any:
    sums = about.get("goodput")
    return sums.get("seconds") if isinstance(sums, dict) else None


def share(seconds: Mapping[str, float], *, idle: bool = True) -> float:
    """The share of the time in steps that counted. Without `idle`, the time between attempts is left out."""
    whole = total(seconds) - (0.0 if idle else seconds.get("idle", 0.0))
    return seconds.get("steps", 0.0) / whole if whole > 0 else 0.0


def of_run(seconds: Mapping[str, float]) -> dict[str, Any]:
    """For run.json."""
    shares = {"share": round(share(seconds), 4), "share_without_idle": round(share(seconds, idle=False), 4)}
    return {"goodput": shares | {"seconds": dict(seconds), "time": round(time.time(), 3)}}


def line(seconds: Mapping[str, float]) -> str:
    """goodput 81 % of 2h10m since the first launch, 94 % without 18m idle between attempts"""
    text = f"goodput {share(seconds):.0%} of {duration(total(seconds))} since the first launch"
    idle = seconds.get("idle", 0.0)
    return f"{text}, {share(seconds, idle=False):.0%} without {duration(idle)} between attempts" if idle >= 1 else text


def process_age_s() -> float:
    """Seconds since this process was started, imports included; 0 where /proc does not tell."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(float(Path("/proc/uptime").read_text().split()[0]) - started, 0.0)
    except (OSError, ValueError, IndexError):
        return 0.0
