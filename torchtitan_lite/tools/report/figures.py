"""The data of the report's figures. report.js draws them: it smooths curves, and converts steps to tokens or time.

plotly reads names and labels as a kind of HTML, so they are escaped here.
"""

import html
import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.tools.report.runs import BY_SOURCE, TASK, Run

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")
GREY = "#888888"
NATS = "nats per token"  # the unit of a loss
DASHES = "solid", "dash", "dot", "dashdot"
POINTS = 2000  # per curve: more would slow the page without being visible
_MARKS = 50  # of spikes in a run: more would cover the curves
# a change of these keys does not touch the curves
_NOT_MARKED = "log.", "profile.", "checkpoint.", "sample.", "run.", "data.cache_dir"

Figure = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A line of a figure: for each run, the values of a key in its records."""

    key: str
    label: str = ""
    colour: str = ""  # where there is one run; of several, each has its colour
    dash: str = "solid"
    width: float = 1.6
    smooth: bool = False  # whether smoothing applies
    errors: str = ""  # the key of standard errors


def figure(runs: list[Run], title: str, unit: str, lines: list[Line], **more: Any) -> Figure | None:
    """A figure over steps; None if no run has values.

    Args:
        more: `axis` (of plotly, for the values), `format` of a value, `levels`.
    """
    traces = []
    for (i, run), line in itertools.product(enumerate(runs), lines):
        records = run.having(line.key)
        values = [r[line.key] for r in records]
        if all(value is None for value in values):
            continue
        trace = thinned([r["step"] for r in records], values)
        if line.errors:
            errors = {r["step"]: r.get(line.errors) for r in records}
            trace["errors"] = [errors[step] for step in trace["x"]]
        traces.append(
            trace
            | {
                "run": i,
                "label": html.escape(line.label),
                "name": html.escape(f"{run.name} {line.label}".strip() if len(runs) > 1 else line.label or title),
                "color": (line.colour or COLOURS[0]) if len(runs) == 1 else COLOURS[i % len(COLOURS)],
                "dash": line.dash,
                "width": line.width,
                "smooth": line.smooth,
            }
        )
    return {"title": title, "unit": unit, "traces": traces, **more} if traces else None


def thinned(x: list[int], y: list[float | None]) -> dict[str, Any]:
    """At most POINTS points: the lowest and highest of each interval, so that spikes are kept.

    `mean` has the mean of each point's interval, which is what smoothing needs.
    """
    if len(x) <= POINTS:
        return {"x": x, "y": y}
    width = math.ceil(len(x) / (POINTS // 2))
    kept: list[int] = []
    means: list[float | None] = []
    for start in range(0, len(x), width):
        interval = range(start, min(start + width, len(x)))
        finite = {i: value for i in interval if (value := y[i]) is not None}
        if not finite:
            kept.append(start)
            means.append(None)
            continue
        ends = sorted({min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)})
        kept += ends
        means += [statistics.fmean(finite.values())] * len(ends)
    return {"x": [x[i] for i in kept], "y": [y[i] for i in kept], "mean": means}


def axes(run: Run) -> dict[str, Any]:
    """By step: the tokens seen, and the seconds of training, without saves, validations and stops."""
    seconds = list(itertools.accumulate(r.get("seconds") or 0.0 for r in run.steps))
    kept = sorted({*range(0, len(run.steps), math.ceil(len(run.steps) / POINTS)), len(run.steps) - 1})
    tokens = [run.steps[i].get("tokens") for i in kept]
    return {
        "steps": [run.steps[i]["step"] for i in kept],
        "tokens": [] if None in tokens else tokens,
        "time": [round(seconds[i], 3) for i in kept] if seconds[-1] else [],
    }


def marks(run: Run) -> list[tuple[int, str]]:
    """Steps to mark in all figures, and texts: changes by a resume, losses that are not finite, and spikes."""
    changed: dict[int, list[str]] = {}
    for step, key, _, _ in run.changes:
        if not key.startswith(_NOT_MARKED):
            changed.setdefault(step, []).append(key.split(".")[-1])
    found = [(step, _listed(names, 3)) for step, names in changed.items()]
    found += [(r["step"], "not finite") for r in run.steps if r["loss"] is None][:1]
    texts = {"skip": "spike skipped"}
    found += [(r["step"], texts.get(r["spike"]["action"], "spike")) for r in run.having("spike")[:_MARKS]]
    return [(step, html.escape(text)) for step, text in found]


def _listed(names: list[str], most: int) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


# --- diverged runs ------------------------------------------------------------------------------------------------


def ceiling(runs: list[Run]) -> float:
    """The highest loss that an axis shows: 1.25 times the initial one. A diverged run must not flatten the others.

    The initial loss is the highest of the runs, without those whose first record is far above the others. A run alone
    that is higher in three quarters of its records is not cut there.
    """
    losses = [run.losses for run in runs if run.losses]
    if not losses:
        return math.inf
    first = [of_run[0] for of_run in losses]
    initial = max(loss for loss in first if loss <= 3 * abs(statistics.median_low(first)))
    return 1.25 * max(initial, min(sorted(of_run)[len(of_run) // 4] for of_run in losses))


def diverged(run: Run, limit: float) -> bool:
    """Whether the last losses are not finite, above the axis, or twice the first one."""
    last = statistics.median_high([math.inf if r["mean_loss"] is None else r["mean_loss"] for r in run.steps[-5:]])
    return last > limit or last == math.inf or last > 2 * run.losses[0] > 0


def cut(found: Figure | None, limit: float) -> Figure | None:
    """The figure with an axis that ends at the limit, and triangles where curves leave it."""
    values = [y for trace in found["traces"] for y in trace["y"] if y is not None] if found else []
    if not found or max(values) <= limit or min(values) >= limit:
        return found
    for trace in found["traces"]:
        trace["leaves"] = _leaves(trace["x"], trace["y"], limit)
    unit = f"{found['unit']}; the axis ends at {limit:.3g}, curves that leave it (triangles) reach {max(values):,.4g}"
    below = 0.05 * (limit - min(values))
    return found | {"unit": unit, "axis": {"range": [min(values) - below, limit]}}


def _leaves(x: list[int], y: list[float | None], limit: float) -> list[float]:
    """Where a curve rises above the limit: between two steps, as it is drawn; at the step after a gap."""
    found: list[float] = []
    before: float | None = None  # the last finite value
    for i, value in enumerate(y):
        if value is None:
            continue
        if value > limit and (before is None or before <= limit):
            share = 0.0 if before is None or y[i - 1] is None else (value - limit) / (value - before)
            found.append(x[i] - share * (x[i] - x[i - 1]))
        before = value
    return found


# --- the figures ------------------------------------------------------------------------


def loss(runs: list[Run]) -> Figure | None:
    lines = [
        Line("mean_loss", "train", width=1.2, smooth=True),
        Line("val_loss", "validation", COLOURS[1], width=2.4),
        Line("ema_val_loss", "validation of averaged weights", COLOURS[2], "dash", 2.4),
    ]
    return cut(figure(runs, "Loss", NATS, lines, format=".4f"), ceiling(runs))


def bits_per_byte(runs: list[Run]) -> Figure | None:
    unigram = "unigram model" + (": each token guessed by its frequency alone" if len(runs) == 1 else "")
    lines = [
        Line("val_bits_per_byte", "validation", COLOURS[1]),
        Line("ema_val_bits_per_byte", "averaged weights", COLOURS[2], "dash"),
        Line("unigram_bits_per_byte", unigram, GREY, "dot", 1.2),
    ]
    scores = [(r.get("val_bits_per_byte"), r["val_loss"]) for run in runs for r in run.validations]
    ratios = [bits / nats for bits, nats in scores if bits and nats]
    limit = ceiling(runs) * statistics.median(ratios) if ratios else math.inf
    return cut(figure(runs, "Bits per byte", "bits per byte of held-out text", lines, format=".3f"), limit)


def loss_by_source(runs: list[Run]) -> Figure | None:
    keys = [key for key in _keys(runs) if key.startswith(BY_SOURCE[0])]
    lines = _family({key: key.removeprefix(BY_SOURCE[0]) for key in keys})
    return cut(figure(runs, "Validation loss by source", NATS, lines, format=".4f"), ceiling(runs))


def tasks(runs: list[Run]) -> Figure | None:
    """Scores with error bars, a line at each chance level, and an axis that shows them."""
    names = task_names(runs)
    found = figure(runs, "Tasks", "score", _family({TASK[0] + name: name for name in names}), format=".3f")
    if found is None:
        return None
    levels: dict[float, list[str]] = {}
    for name in names:
        for value in {r[TASK[2] + name] for run in runs for r in run.records if r.get(TASK[2] + name)}:
            levels.setdefault(round(value, 3), []).append(name)
    tops = [*levels, 0.05]
    for trace in found["traces"]:
        tops += [y + (e or 0.0) for y, e in zip(trace["y"], trace["errors"], strict=True) if y is not None]
    return found | {
        "unit": f"score of {names[0]}" if len(names) == 1 else "score",
        "levels": [
            {"y": value, "text": html.escape("chance" if len(levels) == 1 else f"chance of {_listed(of, 2)}")}
            for value, of in levels.items()
        ],
        "axis": {"range": [0, 1.1 * max(tops)]},
    }


def gradient_norm(runs: list[Run]) -> Figure | None:
    """A logarithmic axis that begins and ends at labelled ticks. plotly labels a short one with digits: 0.3 is "3"."""
    norms = [r["grad_norm"] for run in runs for r in run.steps if (r.get("grad_norm") or 0.0) > 0]
    low, high = min(norms, default=1.0), max(norms, default=1.0)
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 2)
    digits = (1, 1.5, 2, 3, 4, 5, 7) if high < 10 * low else (1, 2, 5) if len(powers) < 5 else (1,)
    ticks = [digit * 10.0**n for n in powers[:: len(powers) // 12 + 1] for digit in digits]
    ends = max((t for t in ticks if t <= low), default=low), min((t for t in ticks if t >= high), default=high)
    axis = {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [f"{tick:g}".replace("e+0", "e").replace("e+", "e") for tick in ticks],
        "range": [math.log10(ends[0]) - 0.05, math.log10(ends[1]) + 0.05],
    }
    lines = [Line("grad_norm", width=1.2, smooth=True)]
    return figure(runs, "Gradient norm, before clipping", "", lines, format=".4~g", axis=axis)


def task_names(runs: list[Run]) -> list[str]:
    return [key.removeprefix(TASK[0]) for key in _keys(runs) if key.startswith(TASK[0])]


def _keys(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for record in run.records for key in record))


def _family(labels: dict[str, str]) -> list[Line]:
    """Lines of one kind. Dashes tell them apart where each run has one colour."""
    return [
        Line(
            key,
            label,
            COLOURS[i % len(COLOURS)],
            DASHES[i % len(DASHES)],
            errors=key.replace(TASK[0], TASK[1], 1) if key.startswith(TASK[0]) else "",
        )
        for i, (key, label) in enumerate(labels.items())
    ]


def curve(title: str, unit: str, line: Line, **more: Any) -> Callable[[list[Run]], Figure | None]:
    """A figure with one line for each run."""
    return lambda runs: figure(runs, title, unit, [line], **more)


FROM_ZERO = {"rangemode": "tozero"}
learning_rate = curve("Learning rate", "", Line("lr"), format=".3~e", axis=FROM_ZERO | {"tickformat": "~e"})
throughput = curve(
    "Throughput",
    "tokens per second",
    Line("tokens_per_second", width=1.2, smooth=True),
    format=",.0f",
    axis=FROM_ZERO,
)
memory = curve("Peak memory of rank 0", "GiB", Line("peak_memory_gib"), format=".2f", axis=FROM_ZERO)
loss_scale = curve("Loss scale (float16)", "", Line("loss_scale"), format=",~g", axis={"type": "log"})
