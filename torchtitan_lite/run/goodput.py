"""Goodput: the share of the time since a run's first launch that went into steps that count.

The rest is starting, loading, saving, validation, samples, the steps that a later attempt makes again, and the time
between attempts. A record of a step has the seconds of training since the record before, in the same attempt, so what a
killed attempt did after its last record is not counted.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_lite.run import attempts
from torchtitan_lite.terminal import duration


def goodput(made: Sequence[attempts.Attempt], records: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The goodput of a run, 0 to 1, and the seconds from its first launch to its last record or end.

    Args:
        made: all attempts.
        records: those of metrics.jsonl that count.
    """
    if not made:
        return 0.0, 0.0
    trained_s = sum(record["seconds"] for record in records if "loss" in record)
    ends = [attempt.end_time for attempt in attempts.that_count(made)]  # not of a finished run that is started again
    last = max([*ends, *(record["time"] for record in records)], default=0.0)
    whole_s = max(last - made[0].time, trained_s)  # a clock may have been set back
    return (trained_s / whole_s if trained_s else 0.0), whole_s


def goodput_line(folder: Path) -> str:
    """goodput 81 % of 2h10m since the first launch"""
    share, seconds = goodput(attempts.read(folder), attempts.records(folder))
    return f"goodput {share:.0%} of {duration(seconds)} since the first launch"


def process_age_s() -> float:
    """Seconds since this process was started, imports included; 0 where /proc does not tell."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(float(Path("/proc/uptime").read_text().split()[0]) - started, 0.0)
    except (OSError, ValueError, IndexError):
        return 0.0
