"""Simulated goodput against three reports: `python -m benchmarks.goodput`. Prints the tables of docs/plan.md.

Nothing is fitted: the rate of failures is Llama 3's, the parts are the defaults of `plan --mtbf`, and a stall that a
report states takes the place of detection and restart. No report states the bytes of its checkpoint or how often it
saves: each is simulated with the bytes of Llama 3 405B (float32 parameters, two moments) and its best interval.
"""

from dataclasses import replace
from typing import NamedTuple

from torchtitan_lite.tools.estimate.failures import INPUTS, LLAMA3_HOURS, SIZES, Saves, best, failure_lines, parts_of

BYTES = 12 * 405e9


class Report(NamedTuple):
    """A published goodput."""

    source: str
    gpus: int
    days: int
    goodput: str
    stall_s: float | None = None  # of each failure, if the report states it


REPORTS = [
    Report("Meta, Llama 3 (2024), 419 interruptions", 16_384, 54, "over 90%"),
    Report("ByteRobust (2509.16293)", 9_600, 90, "97%"),
    Report("FT-HSDP (2602.00277), synchronous", 100_000, 54, "44%", 600.0),
    Report("FT-HSDP, replicas restart alone", 100_000, 54, "80%", 180.0),
]


def main() -> None:
    values = {name: default for name, (default, _, _) in INPUTS.items()}
    for background in (True, False):
        lines = failure_lines(list(SIZES), LLAMA3_HOURS, Saves(BYTES, True, background), values, per_machine=8)
        print("\n".join(lines))
    print("\n| report | GPUs | reported | with spares | without | with the stall that it states | its stall alone |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for report in REPORTS:
        parts = parts_of(report.gpus, LLAMA3_HOURS, Saves(BYTES, True, True), values, per_machine=8)
        shown = [best(p, days=report.days).shares["steps"] for p in (parts, replace(parts, spares=0))]
        stated, alone = "", ""
        if report.stall_s is not None:
            stalled = replace(parts, detect_s=0.0, restart_s=report.stall_s)
            stated = f"{best(stalled, days=report.days).shares['steps']:.1%}"
            # the time between failures at which nothing but the stalls gives the reported figure
            needed = report.stall_s / (1 - float(report.goodput.rstrip("%")) / 100)
            alone = f"one failure in {needed / 60:.0f} min: {needed / 3600 * report.gpus:,.0f} GPU-hours"
        cells = [report.source, f"{report.gpus:,}", report.goodput, *(f"{s:.1%}" for s in shown), stated, alone]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
