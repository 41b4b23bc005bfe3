"""Draws the curves of the report: one plotly figure with a subplot per panel, which zoom together.

Buttons smooth the curves and change the x axis; a click in a legend hides a curve or a run. plotly interprets names and
labels as HTML, so they are escaped here.
"""

import html
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from torchtitan_lite.tools.report.runs import Records, Run

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac")
# readable on white and on black
GREY, TEXT, GRID, CLEAR = "#888888", "#7a8391", "rgba(128, 128, 128, 0.2)", "rgba(0, 0, 0, 0)"
SMOOTHING = 0, 1, 2, 5, 10  # half-lives, in % of all steps
POINTS = 1000  # maximum per curve: more would not be visible
_DASHES = "solid", "dash", "dot", "dashdot"
_ROW, _GAP, _TOP, _BOTTOM = 300, 64, 110, 30  # pixels

Values = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """The values of one key in each run's records."""

    key: str
    label: str = ""
    dash: str = "solid"
    width: float = 1.6
    smooth: bool = False  # whether smoothing applies
    grey: bool = False  # in every colour scheme


@dataclass(frozen=True)
class Panel:
    """A subplot.

    Args:
        spec: the d3 format of values.
        axis: plotly's options of the value axis.
        ends: whether the axis ends near the first values, so that a diverged run does not flatten the other curves.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    spec: str
    axis: dict[str, Any] = field(default_factory=dict)
    ends: bool = False


def _panels(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels in the order of the page, without those that no run has values for."""
    keys = list(dict.fromkeys(key for run in runs for record in run.records for key in record))

    def family(prefix: str) -> list[Line]:
        found = [key for key in keys if key.startswith(prefix)]
        dashes = itertools.cycle(_DASHES)
        return [Line(key, key.removeprefix(prefix), next(dashes) if len(runs) > 1 else "solid") for key in found]

    zero = {"rangemode": "tozero"}
    log = {"type": "log", "minorloglabels": "complete"}
    nats, bits = "nats per token", "bits per byte of held-out text"
    loss = (
        Line("mean_loss", "train", width=1.3, smooth=True),
        Line("val_loss", "validation", width=2.4),
        Line("ema_val_loss", "validation of averaged weights", "dash", 2.4),
    )
    bits_per_byte = (
        Line("val_bits_per_byte", "validation"),
        Line("ema_val_bits_per_byte", "averaged weights", "dash"),
        Line("unigram_bits_per_byte", "unigram model", "dot", 1.2, grey=True),
    )
    panels = [
        Panel("Loss", nats, loss, ".4f", ends=True),
        Panel("Bits per byte", bits, bits_per_byte, ".3f", ends=True),
        Panel("Validation loss by source", nats, family("val_loss/"), ".4f", ends=True),
        Panel("Tasks", "score", family("task/"), ".3f", zero),
        Panel("Learning rate", "", [Line("lr")], ".3~e", zero | {"tickformat": "~e"}),
        Panel("Gradient norm", "before clipping", [Line("grad_norm", width=1.3, smooth=True)], ".4~g", log),
        Panel("Throughput", "tokens per second", [Line("tokens_per_second", width=1.3, smooth=True)], ",.0f", zero),
        Panel("Peak memory of rank 0", "GiB", [Line("peak_memory_gib")], ".2f", zero),
        Panel("Loss scale", "float16", [Line("loss_scale")], ",~g", log),
    ]
    present = {key for run in runs for record in run.records for key, value in record.items() if value is not None}
    return [panel for panel in panels if any(line.key in present for line in panel.lines)]


def figure(runs: Sequence[Run]) -> go.Figure:
    panels = _panels(runs)
    curves = _Curves(runs, len(panels))
    for number, panel in enumerate(panels):
        curves.add_panel(number, panel)
    for i, run in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)] if len(runs) > 1 else COLOURS[4]
        if len(runs) > 1:  # the legend of the runs
            name = {"name": html.escape(run.name), "legend": "legend", "legendgroup": str(i), "mode": "lines"}
            curves.add(0, name | {"y": [None], "line": {"color": colour, "width": 4}}, run, [1])
        if run.events:
            curves.add(0, _marks(run, colour) | {"legendgroup": str(i)}, run, list(run.events))
    curves.finish()
    return curves.figure


class _Curves:
    """Builds the figure.

    With several runs, each has one colour and an entry in the legend above; dashes and widths tell its lines apart.
    With one run, each line has a colour.
    """

    def __init__(self, runs: Sequence[Run], n_panels: int) -> None:
        self.runs, self.several = runs, len(runs) > 1
        n_rows = -(-n_panels // 2)
        self.plot_height = n_rows * _ROW
        self.figure = make_subplots(
            n_rows,
            2,
            specs=[[{}, {} if 2 * row + 1 < n_panels else None] for row in range(n_rows)],
            shared_xaxes="all",
            vertical_spacing=_GAP / self.plot_height if n_rows > 1 else 0,
            horizontal_spacing=0.06,
        )
        longest = max(sum(record["seconds"] for record in run.steps) for run in runs)
        self.time_unit, self.unit_s = ("hours", 3600) if longest > 7200 else ("minutes", 60)
        self.positions: list[dict[str, list[float]]] = []  # per trace: x in every unit
        self.smoothed: dict[int, list[Values]] = {}  # by trace: y for each of SMOOTHING

    def add(self, number: int, trace: dict[str, Any], run: Run, steps: Sequence[float]) -> None:
        """Add a trace to a panel.

        The x axis shows steps, tokens, or training time without saves, validations and stops.
        """
        self.figure.add_scatter(x=list(steps), row=number // 2 + 1, col=number % 2 + 1, **trace)
        known = [record["step"] for record in run.steps]
        tokens = [record["tokens"] for record in run.steps]
        time = np.cumsum([record["seconds"] for record in run.steps]) / self.unit_s
        self.positions.append(
            {
                "steps": list(steps),
                "tokens": np.interp(steps, known, tokens).tolist(),
                self.time_unit: np.interp(steps, known, time).round(5).tolist(),
            }
        )

    def add_panel(self, number: int, panel: Panel) -> None:
        for (i, run), (j, line) in itertools.product(enumerate(self.runs), enumerate(panel.lines)):
            colour = COLOURS[(i if self.several else j) % len(COLOURS)]
            self._add_line(number, panel, run, line, GREY if line.grey and not self.several else colour)
        row, column = number // 2 + 1, number % 2 + 1
        x_axis, y_axis = self.figure.get_subplot(row, column)
        y_axis.update(panel.axis)
        unit = panel.unit
        if panel.ends:
            curves = [_finite(run.having(line.key), line.key) for run in self.runs for line in panel.lines]
            lowest, highest = min(map(min, filter(None, curves))), max(map(max, filter(None, curves)))
            if highest > (limit := _limit(list(filter(None, curves)))):
                y_axis.range = [lowest - 0.05 * (limit - lowest), limit]
                unit += f"; the axis ends at {limit:.3g}, the curves reach {highest:,.4g}"
        self._write(
            f"<b>{panel.title}</b>  <span style='color: {TEXT}'>{unit}</span>", x_axis.domain[0], y_axis.domain[1]
        )
        if panel.title == "Tasks":
            keys = [f"task_chance/{line.label}" for line in panel.lines]
            for chance in {r[key] for key in keys for run in self.runs for r in run.having(key)} - {None}:
                dotted = {"color": GREY, "dash": "dot", "width": 1.2}
                note = {"annotation_text": "chance", "annotation_position": "top left", "annotation_font_size": 10}
                self.figure.add_hline(chance, row=row, col=column, line=dotted, **note)
        if len(panel.lines) > 1:
            self._add_legend(number, panel, x_axis.domain[1], y_axis.domain[1])

    def _add_line(self, number: int, panel: Panel, run: Run, line: Line, colour: str) -> None:
        records = run.having(line.key)
        values: Values = [record[line.key] for record in records]
        if not _finite(records, line.key):
            return
        kept = _thinned(values)
        steps = [records[n]["step"] for n in kept]
        label = f"{run.name} {line.label}".strip() if self.several else line.label or panel.title
        trace: dict[str, Any] = {
            "y": [values[n] for n in kept],
            "name": html.escape(label),
            "mode": "lines+markers" if len(kept) < 40 else "lines",
            "line": {"color": colour, "dash": line.dash, "width": line.width},
            "marker": {"size": 5},
            "hovertemplate": f"%{{y:{panel.spec}}}",
            "legend": "legend" if self.several else f"legend{number + 2}",
            "legendgroup": str(self.runs.index(run)) if self.several else line.key,
            "showlegend": not self.several and len(panel.lines) > 1,
        }
        if line.key.startswith("task/"):
            errors = [records[n].get(f"task_stderr/{line.label}") for n in kept]
            trace["error_y"] = {"array": errors, "thickness": 1.2, "width": 3}
        if line.smooth:  # the curve itself stays visible
            raw = {"opacity": 0.3, "hoverinfo": "skip", "hovertemplate": None, "showlegend": False}
            self.add(number, trace | raw, run, steps)
            span = max(one.steps[-1]["step"] for one in self.runs) - min(one.steps[0]["step"] for one in self.runs)
            halves = [share / 100 * span for share in SMOOTHING]
            means = [_smoothed([record["step"] for record in records], values, half) for half in halves]
            self.smoothed[len(self.positions)] = [[curve[n] for n in kept] for curve in means]
        self.add(number, trace, run, steps)

    def _add_legend(self, number: int, panel: Panel, x: float, y: float) -> None:
        """Add a legend at the right end of the title, or inside the panel if it is long."""
        inside = len(panel.lines) > 3
        legend = {"x": x, "y": y, "xanchor": "right", "yanchor": "top" if inside else "bottom", "font_size": 12}
        legend |= {"orientation": "v" if inside else "h", "bgcolor": CLEAR}
        if self.several:
            legend |= {"itemclick": False, "itemdoubleclick": False}
            for line in panel.lines:
                if any(_finite(run.having(line.key), line.key) for run in self.runs):
                    stroke = {"color": GREY, "dash": line.dash, "width": line.width}
                    entry = {"y": [None], "name": html.escape(line.label), "line": stroke, "mode": "lines"}
                    self.add(number, entry | {"legend": f"legend{number + 2}"}, self.runs[0], [1])
        self.figure.update_layout({f"legend{number + 2}": legend})

    def finish(self) -> None:
        """Add the buttons, and the remaining colours."""
        look = {"type": "buttons", "direction": "right", "xanchor": "left", "yanchor": "bottom", "pad_t": 0}
        look |= {"bgcolor": CLEAR, "bordercolor": GRID, "y": 1 + 32 / self.plot_height}
        axes = [f"xaxis{n}" if n > 1 else "xaxis" for n in range(1, len(list(self.figure.select_xaxes())) + 1)]
        wide = {f"{axis}.autorange": True for axis in axes}
        units = [
            {"label": unit, "method": "update", "args": [{"x": [each[unit] for each in self.positions]}, wide]}
            for unit in self.positions[0]
        ]
        halves = [
            {
                "label": f"{share} %" if share else "off",
                "method": "restyle",
                "args": [{"y": [curves[n] for curves in self.smoothed.values()]}, list(self.smoothed)],
            }
            for n, share in enumerate(SMOOTHING)
        ]
        self._write("x axis", 0, 1, yshift=40)
        self._write("smoothing", 0.26, 1, yshift=40)
        axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID, "automargin": True}
        self.figure.update_xaxes(showticklabels=True, **axis)
        self.figure.update_yaxes(**axis)
        runs = {"orientation": "h", "x": 1, "xanchor": "right", "yanchor": "bottom", "font_size": 13}
        self.figure.update_layout(
            height=self.plot_height + _TOP + _BOTTOM,
            font={"color": TEXT, "family": "system-ui, sans-serif", "size": 12},
            margin={"l": 10, "r": 10, "t": _TOP, "b": _BOTTOM},
            paper_bgcolor=CLEAR,
            plot_bgcolor="rgba(128, 128, 128, 0.05)",
            hovermode="x unified",
            hoverlabel={"bgcolor": "#1d2430", "font": {"color": "#ffffff"}, "namelength": -1},
            modebar={"bgcolor": CLEAR, "color": GREY, "activecolor": TEXT},
            legend=runs | {"y": 1 + 34 / self.plot_height},
            updatemenus=[look | {"buttons": units, "x": 0.05}, look | {"buttons": halves, "x": 0.34}],
        )

    def _write(self, text: str, x: float, y: float, yshift: int = 0) -> None:
        """Write text above a position in the figure."""
        place = {"xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "showarrow": False}
        self.figure.add_annotation(text=text, x=x, y=y, yshift=yshift, font_size=14 if not yshift else 12, **place)


def _marks(run: Run, colour: str) -> dict[str, Any]:
    """Return a trace that marks the run's events on its loss curve."""
    known = [(r["step"], r["mean_loss"]) for r in run.steps if r["mean_loss"] is not None] or [(0, 0.0)]
    return {
        "y": [next((loss for step, loss in reversed(known) if step <= at), known[0][1]) for at in run.events],
        "text": [html.escape(text) for text in run.events.values()],
        "mode": "markers+text",
        "marker": {"symbol": "diamond", "size": 9, "color": colour},
        "textposition": "top right",
        "textfont": {"color": colour, "size": 11},
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    }


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


def _finite(records: Records, key: str) -> list[float]:
    return [record[key] for record in records if record[key] is not None]


def _limit(curves: Sequence[Sequence[float]]) -> float:
    """Return the highest value that an axis shows: 1.25 times the highest first value.

    Curves that begin far above the others do not count. The limit is raised until at least one curve has three quarters
    of its values below it.
    """
    first = [values[0] for values in curves]
    initial = max(value for value in first if value <= 3 * abs(statistics.median_low(first)))
    return 1.25 * max(initial, min(sorted(values)[len(values) // 4] for values in curves))
