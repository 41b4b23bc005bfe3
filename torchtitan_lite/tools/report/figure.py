"""Draws the curves of the report: one plotly figure with a subplot per panel, which zoom together.

PANELS describes the panels. Buttons smooth the curves and change the x axis; a click in a legend hides a curve or a
run. plotly interprets names and labels as HTML, so they are escaped here.
"""

import html
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from torchtitan_lite.tools.report.runs import Run

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")
# readable on white and on black
GREY, TEXT, GRID, CLEAR = "#888888", "#7a8391", "rgba(128, 128, 128, 0.2)", "rgba(0, 0, 0, 0)"
SMOOTHING = 0, 1, 2, 5, 10  # half-lives, in % of all steps
POINTS = 1000  # maximum per curve: more would not be visible
_DASHES = "solid", "dash", "dot", "dashdot"
_ROW, _GAP, _TOP, _BOTTOM = 300, 64, 110, 30  # pixels

Values = Sequence[float | None]


@dataclass(frozen=True)
class Panel:
    """A subplot with one curve for each of its keys, for each run.

    Args:
        keys: keys of the records, with their labels. A key that ends in "/" stands for all keys that begin with it.
        spec: the d3 format of values.
        axis: plotly's options of the value axis.
        smooth: whether the buttons smooth its training curves.
        ends: whether the axis ends near the first values, so that a diverged run does not flatten the other curves.
        heat: draw a heat map with a row for each key instead of curves; only for several keys of a single run.
    """

    title: str
    unit: str
    keys: Mapping[str, str]
    spec: str = ".4~g"
    axis: Mapping[str, Any] = field(default_factory=dict)
    smooth: bool = False
    ends: bool = False
    heat: bool = False


_ZERO, _LOG = {"rangemode": "tozero"}, {"type": "log", "minorloglabels": "complete"}
# A number of the step records that no panel names gets a panel of its own at the end.
PANELS = (
    Panel(
        "Loss",
        "nats per token",
        {"mean_loss": "train", "val_loss": "validation", "ema_val_loss": "validation of averaged weights"},
        ".4f",
        smooth=True,
        ends=True,
    ),
    Panel(
        "Bits per byte",
        "of held-out text",
        {
            "val_bits_per_byte": "validation",
            "ema_val_bits_per_byte": "averaged weights",
            "unigram_bits_per_byte": "unigram model",
        },
        ".3f",
        ends=True,
    ),
    Panel("Validation loss by source", "nats per token", {"val_loss/": ""}, ".4f", ends=True),
    Panel("Tasks", "score", {"task/": "", "task_chance/": "chance"}, ".3f", _ZERO),
    Panel("Learning rate", "", {"lr": ""}, ".3~e", _ZERO | {"tickformat": "~e"}),
    Panel("Gradient norm", "before clipping", {"grad_norm": ""}, ".4~g", _LOG, smooth=True),
    Panel("Gradient norm by block", "log10", {"grad_norm/": ""}, heat=True),
    Panel("Weight norm by block", "log10", {"weight_norm/": ""}, heat=True),
    Panel("Norm of updates by block", "log10", {"update_norm/": ""}, heat=True),
    Panel("Seconds of computing by rank", "log10", {"rank_seconds/": ""}, heat=True),
    Panel("Throughput", "tokens per second", {"tokens_per_second": ""}, ",.0f", _ZERO, smooth=True),
    Panel(
        "Seconds since the previous record",
        "",
        {"data_s": "waiting for data", "optimizer_s": "optimizer"},
        ".3~g",
        _ZERO,
    ),
    Panel("Peak memory of rank 0", "GiB", {"peak_memory_gib": ""}, ".2f", _ZERO),
    Panel("Loss scale", "float16", {"loss_scale": ""}, ",~g", _LOG),
    Panel("Load of experts", "relative to the mean of the layer", {"load_max": "highest", "load_min": "lowest"}),
)
_NOT_DRAWN = {"step", "attempt", "time", "tokens", "loss", "seconds"}


@dataclass(frozen=True)
class _Curve:
    """A curve of a run in a panel.

    Args:
        steps: its x values.
        trace: plotly's options, with its y values.
        smoothed: the y values for each of SMOOTHING, if the buttons change them.
    """

    panel: int
    run: Run
    steps: Sequence[float]
    trace: Mapping[str, Any]
    smoothed: Sequence[Values] = ()


def figure(runs: Sequence[Run]) -> go.Figure:
    """Draw the panels that these runs have values for.

    With several runs, each has one colour and an entry in the legend above; dashes tell its lines apart. With one run,
    each line has a colour.
    """
    panels, several = _panels(runs), len(runs) > 1
    n_rows = -(-len(panels) // 2)
    height = n_rows * _ROW
    axes = [_axis(panel, runs) for panel in panels]
    cells = [{"row": n // 2 + 1, "col": n % 2 + 1} for n in range(len(panels))]
    drawn = make_subplots(
        n_rows,
        2,
        specs=[[{}, {} if 2 * row + 1 < len(panels) else None] for row in range(n_rows)],
        subplot_titles=[title for title, _ in axes],
        shared_xaxes="all",
        vertical_spacing=_GAP / height if n_rows > 1 else 0,
        horizontal_spacing=0.06,
    )
    drawn.update_annotations(font_size=14)
    grid = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}
    drawn.update_xaxes(showticklabels=True, **grid)
    curves = list(_curves(runs, panels))
    for curve in curves:
        drawn.add_trace({"x": curve.steps, **curve.trace}, **cells[curve.panel])
    fixed = {"itemclick": False, "itemdoubleclick": False} if several else {}  # a dash has no single curve to hide
    for n, (cell, (_, axis)) in enumerate(zip(cells, axes, strict=True)):
        drawn.update_yaxes(**grid, **axis, **cell)
        x, y = (each.domain[0] for each in drawn.get_subplot(**cell))
        corner = {"x": x, "xanchor": "left", "y": y, "yanchor": "bottom", "bgcolor": CLEAR}  # few curves pass here
        drawn.update_layout({f"legend{n + 2}": corner | fixed})
    drawn.update_layout(
        height=height + _TOP + _BOTTOM,
        font={"color": TEXT, "family": "system-ui, sans-serif", "size": 12},
        margin={"l": 10, "r": 24, "t": _TOP, "b": _BOTTOM},
        paper_bgcolor=CLEAR,
        plot_bgcolor="rgba(128, 128, 128, 0.05)",
        hovermode="x unified",
        hoverlabel={"bgcolor": "#1d2430", "font": {"color": "#ffffff"}, "namelength": -1},
        modebar={"bgcolor": CLEAR, "color": GREY, "activecolor": TEXT},
        legend={"orientation": "h", "x": 0, "y": 1 + 68 / height, "yanchor": "bottom", "font_size": 13},
        updatemenus=_buttons(runs, curves, 1 + 34 / height),
    )
    return drawn


def _panels(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels in the order of the page, with the keys for which these runs have numbers.

    Other numbers of the step records follow: a panel for each, or for all with the same part before a "/".
    """
    in_steps = dict.fromkeys(key for run in runs for record in run.steps for key in record)
    numbers = dict.fromkeys(
        key for run in runs for record in run.records for key, value in record.items() if type(value) in (int, float)
    )

    def with_keys(panel: Panel) -> Panel:
        found = {
            key: label or key.removeprefix(named)
            for named, label in panel.keys.items()
            for key in numbers
            if key == named or (named.endswith("/") and key.startswith(named))
        }
        return replace(panel, keys=found)

    panels = [*map(with_keys, PANELS)]
    known = _NOT_DRAWN.union(*(panel.keys for panel in panels))
    unknown = [key for key in numbers if key in in_steps and key not in known]
    others = dict.fromkeys("".join(key.partition("/")[:2]) for key in unknown)
    panels += [with_keys(Panel(name.rstrip("/"), "", {name: ""}, smooth=True)) for name in others]
    return [panel for panel in panels if panel.keys and not (panel.heat and (len(runs) > 1 or len(panel.keys) == 1))]


def _axis(panel: Panel, runs: Sequence[Run]) -> tuple[str, Mapping[str, Any]]:
    """Return a panel's title and plotly's options of its value axis."""
    unit, axis = panel.unit, panel.axis
    if panel.ends:
        curves = [values for run in runs for key in panel.keys if (values := _numbers(run, key))]
        lowest, highest, limit = min(map(min, curves)), max(map(max, curves)), _limit(curves)
        if highest > limit:
            axis = {"range": [lowest - 0.05 * (limit - lowest), limit]}
            unit += f"; the axis ends at {limit:.3g}, the curves reach {highest:,.4g}"
    return f"<b>{html.escape(panel.title)}</b>  <span style='color: {TEXT}'>{unit}</span>", axis


def _curves(runs: Sequence[Run], panels: Sequence[Panel]) -> Iterator[_Curve]:
    """Yield the curves of all panels, each run's events, and the entries of several runs in the legend above."""
    several, in_legend = len(runs) > 1, set[tuple[int, str]]()
    for i, run in enumerate(runs):
        for n, panel in enumerate(panels):
            if panel.heat:
                yield _heat_map(n, panel, run)
            for j, key in enumerate(() if panel.heat else panel.keys):
                if not _numbers(run, key):
                    continue
                label = html.escape(panel.keys[key] or panel.title)
                look = {
                    "line": {"color": _colour(i if several else j), "dash": _DASHES[j % len(_DASHES)], "width": 1.6},
                    "name": label,
                    "hovertemplate": f"%{{y:{panel.spec}}}<extra>{html.escape(run.name) * several} {label}</extra>",
                    "legend": f"legend{n + 2}",
                    "legendgroup": str(i) if several else key,
                    "showlegend": len(panel.keys) > 1 and (n, key) not in in_legend,
                }
                in_legend.add((n, key))
                yield from _lines(n, panel, run, key, look)
        if several:
            entry = {"name": html.escape(run.name), "mode": "lines", "line": {"color": _colour(i), "width": 4}}
            yield _Curve(0, run, [1], entry | {"y": [None], "legendgroup": str(i)})
        if run.events:
            marks = _marks(run, _colour(i if several else 4))
            yield _Curve(0, run, list(run.events), marks | {"legendgroup": str(i)})


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _lines(n: int, panel: Panel, run: Run, key: str, look: dict[str, Any]) -> Iterator[_Curve]:
    """Yield the curve of a key; if it can be smoothed, on top of a pale one that stays as it is."""
    records, first, last = run.having(key), run.steps[0], run.steps[-1]
    steps, values = [record["step"] for record in records], [record[key] for record in records]
    kept = _thinned(values)
    x, y = [steps[k] for k in kept], [values[k] for k in kept]
    trace = {"y": y, "mode": "lines+markers" if len(kept) < 40 else "lines", "marker": {"size": 5}} | look
    if key.startswith("task/"):
        errors = [records[k].get(key.replace("task/", "task_stderr/")) for k in kept]
        trace["error_y"] = {"array": errors, "thickness": 1.2, "width": 3}
    if not panel.smooth or key not in first:  # a validation
        yield _Curve(n, run, x, trace)
        return
    yield _Curve(n, run, x, trace | {"opacity": 0.3, "hoverinfo": "skip", "hovertemplate": None, "showlegend": False})
    half_lives = [share / 100 * (last["step"] - first["step"]) for share in SMOOTHING]
    means = [_smoothed(steps, values, half_life) for half_life in half_lives]
    yield _Curve(n, run, x, trace, [[mean[k] for k in kept] for mean in means])


def _heat_map(n: int, panel: Panel, run: Run) -> _Curve:
    """Return a heat map of logarithms, with the keys from bottom to top."""
    records = [record for record in run.steps if next(iter(panel.keys)) in record]
    kept = _thinned([record["grad_norm"] for record in records])
    records = [records[k] for k in kept[:: 1 + len(panel.keys) // 200]]  # of 1,024 ranks, a sixth
    values = [[record.get(key) for record in records] for key in panel.keys]
    look = {
        "type": "heatmap",
        "y": [html.escape(label) for label in panel.keys.values()],
        "z": [[math.log10(value) if value else None for value in row] for row in values],
        "customdata": values,
        "colorscale": "Viridis",
        "showscale": False,
        "hovertemplate": f"%{{y}}: %{{customdata:{panel.spec}}}<extra>{panel.title}</extra>",
    }
    return _Curve(n, run, [record["step"] for record in records], look)


def _marks(run: Run, colour: str) -> dict[str, Any]:
    """Return a trace that marks the run's events on its loss curve."""
    known = [(r["step"], r["mean_loss"]) for r in run.steps if r["mean_loss"] is not None] or [(0, 0.0)]
    middle = (run.steps[0]["step"] + run.steps[-1]["step"]) / 2
    return {
        "y": [next((loss for step, loss in reversed(known) if step <= at), known[0][1]) for at in run.events],
        "text": [html.escape(text) for text in run.events.values()],
        "mode": "markers+text",
        "marker": {"symbol": "diamond", "size": 9, "color": colour},
        # towards the middle, so that no edge cuts it off
        "textposition": ["top right" if at < middle else "top left" for at in run.events],
        "textfont": {"color": colour, "size": 11},
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    }


def _buttons(runs: Sequence[Run], curves: Sequence[_Curve], y: float) -> list[dict[str, Any]]:
    """Return the buttons that change the x axis and smooth the curves.

    The x axis shows steps, tokens, or training time without saves, validations and stops.
    """
    longest = max(sum(record["seconds"] for record in run.steps) for run in runs)
    time_unit, unit_s = ("hours", 3600) if longest > 7200 else ("minutes", 60)

    def positions(curve: _Curve) -> dict[str, list[float]]:
        known, tokens, seconds = zip(*((r["step"], r["tokens"], r["seconds"]) for r in curve.run.steps), strict=True)
        time = np.cumsum(seconds) / unit_s
        return {
            "steps": list(curve.steps),
            "tokens": np.interp(curve.steps, known, tokens).tolist(),
            time_unit: np.interp(curve.steps, known, time).round(5).tolist(),
        }

    x = [*map(positions, curves)]
    axes = {f"xaxis{n or ''}.autorange": True for n in (0, *range(2, 2 + max(curve.panel for curve in curves)))}
    units = [{"label": unit, "method": "update", "args": [{"x": [each[unit] for each in x]}, axes]} for unit in x[0]]
    numbers = [n for n, curve in enumerate(curves) if curve.smoothed]
    halves = [
        {
            "label": f"{share} %" if share else "not smoothed",
            "method": "restyle",
            "args": [{"y": [curves[n].smoothed[k] for n in numbers]}, numbers],
        }
        for k, share in enumerate(SMOOTHING)
    ]
    look = {"type": "buttons", "direction": "right", "yanchor": "bottom", "y": y, "bgcolor": CLEAR, "bordercolor": GRID}
    return [
        look | {"buttons": units, "x": 0, "xanchor": "left"},
        look | {"buttons": halves, "x": 1, "xanchor": "right"},
    ]


def _thinned(values: Values) -> list[int]:
    """Return the positions of at most POINTS values: lowest and highest of each interval, to keep spikes."""
    width = math.ceil(len(values) / (POINTS // 2)) if len(values) > POINTS else 1
    kept: list[int] = []
    for start in range(0, len(values), width):
        part = enumerate(values[start : start + width], start)
        finite = [(value, i) for i, value in part if value is not None]
        kept += sorted({min(finite)[1], max(finite)[1]}) if finite else [start]
    return kept


def _smoothed(steps: Sequence[int], values: Values, half_life: float) -> Values:
    """Return an exponential mean over past steps; with a half-life of 0, the values."""
    total, weight, before, means = 0.0, 0.0, steps[0], list[float | None]()
    for step, value in zip(steps, values, strict=True):
        if value is not None:
            decay = 0.5 ** ((step - before) / half_life) if half_life else 0.0
            total, weight, before = total * decay + value, weight * decay + 1, step
        means.append(None if value is None else total / weight)
    return means


def _numbers(run: Run, key: str) -> list[float]:
    return [record[key] for record in run.having(key) if record[key] is not None]


def _limit(curves: Sequence[Sequence[float]]) -> float:
    """Return the highest value that an axis shows: 1.25 times the highest first value.

    Curves that begin far above the others do not count. The limit is raised until at least one curve has three quarters
    of its values below it.
    """
    first = [values[0] for values in curves]
    initial = max(value for value in first if value <= 3 * abs(statistics.median_low(first)))
    return 1.25 * max(initial, min(sorted(values)[len(values) // 4] for values in curves))
