"""Marks on the curves of the report: changes on a resume, loss spikes, and where a diverged run leaves the axis."""

import html
import math
import statistics
from typing import Any

from torchtitan_lite.terminal import counted
from torchtitan_lite.tools.report.runs import Run

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")
# a change of these keys does not touch the curves
_NOT_MARKED = "log.", "profile.", "checkpoint.", "sample.", "run.", "data.cache_dir"
_MOST = 50  # marks of spikes of a run: more would cover the curves


def marks(runs: list[Run]) -> list[dict[str, Any]]:
    """Lines across a figure: the step, a text, and the colour of the run."""
    found = []
    for i, run in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)] if len(runs) > 1 else "#888888"
        texts = []
        for step, changed in run.changes:
            names = [key.split(".")[-1] for key in changed if not key.startswith(_NOT_MARKED)]
            if names:
                texts.append((step, ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")))
        done = {"skip": "spike skipped", "rewind": "spike"}
        texts += [(r["step"], done.get(str(r["spike"].get("action")), "spike")) for r in run.spikes[:_MOST]]
        texts += [(r["step"], f"rewound from step {r['rewound_from']}") for r in run.rewinds[:_MOST]]
        found += [{"x": step, "text": html.escape(text), "color": colour} for step, text in texts]
    return found


def spike_notes(run: Run) -> list[str]:
    """How many spikes there were, and where the run went back."""
    notes = []
    if run.spikes:
        notes.append(
            f"{run.name}: {counted(len(run.spikes), 'loss spike')}, the first at step {run.spikes[0]['step']}."
        )
    if run.rewinds:
        last = run.rewinds[-1]  # marks of earlier ones may have been abandoned, too
        notes.append(
            f"{run.name}: {counted(last['rewind'], 'rewind')}, the last from step {last['rewound_from']} to "
            f"{last['step'] - 1}; what was abandoned is in spikes.jsonl."
        )
    return notes


# --- diverged runs ----------------------------------------------------------------------------------------------


def ceiling(runs: list[Run]) -> float:
    """The highest loss that an axis shows: 1.25 times the initial one. A diverged run must not flatten the others.

    The initial loss is the highest of the runs, without those whose first record is far above the others. A run alone
    that is higher in three quarters of its records is not cut there.
    """
    known = [losses for run in runs if (losses := [r["mean_loss"] for r in run.steps if r["mean_loss"] is not None])]
    if not known:
        return math.inf
    first = [losses[0] for losses in known]
    initial = max(loss for loss in first if loss <= 3 * abs(statistics.median_low(first)))
    return 1.25 * max(initial, min(sorted(losses)[len(losses) // 4] for losses in known))


def cut(figure: dict[str, Any], limit: float) -> dict[str, Any]:
    """The figure with an axis that ends at the limit, and a triangle wherever a curve leaves it."""
    values = [y for trace in figure["traces"] for y in trace["y"] if y is not None]
    if max(values) <= limit or min(values) >= limit:
        return figure
    outside = []
    for i, trace in enumerate(figure["traces"]):
        marker = {"symbol": "triangle-up", "size": 9, "color": trace["line"]["color"]}
        look = {"type": "scatter", "mode": "markers", "marker": marker, "cliponaxis": False, "hoverinfo": "skip"}
        leaves = _leaves(trace["x"], trace["y"], limit)
        outside.append({"of": i, "x": leaves, "y": [limit] * len(leaves)} | look)
    unit = f"{figure['unit']}; the axis ends at {limit:.3g}, curves that leave it (triangles) reach {max(values):,.4g}"
    below = 0.05 * (limit - min(values))
    return figure | {"unit": unit, "axis": figure["axis"] | {"range": [min(values) - below, limit]}, "outside": outside}


def _leaves(x: list[int], y: list[float | None], limit: float) -> list[float]:
    """Where a curve rises above the limit: between two steps, as it is drawn; at the step after a gap."""
    found: list[float] = []
    before: float | None = None  # the last value that is known
    for i, value in enumerate(y):
        if value is not None and value > limit and (before is None or before <= limit):
            if before is None or y[i - 1] is None:
                found.append(x[i])
            else:
                found.append(x[i] - (x[i] - x[i - 1]) * (value - limit) / (value - before))
        before = before if value is None else value
    return found
