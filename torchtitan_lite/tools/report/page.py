"""The HTML page of `report`, with plotly figures. All text of a run is escaped."""

import html
import json
import math
import statistics
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any

from plotly.offline import get_plotlyjs

from torchtitan_lite.terminal import counted, duration
from torchtitan_lite.tools.report import tasks
from torchtitan_lite.tools.report.marks import COLOURS, ceiling, cut, marks, spike_notes
from torchtitan_lite.tools.report.runs import BY_SOURCE, ROUGE, Records, Run
from torchtitan_lite.tools.report.table import best_validation, changes_of, differing_keys

DASHES = "solid", "dash", "dot"  # of sources, which share the colour of their run where there are several
POINTS = 2000  # per curve: more would slow the page without being visible
SAMPLES = 12  # per prompt

Points = tuple[list[int], list[float | None]]


def thinned(x: list[int], y: list[float | None]) -> Points:
    """At most POINTS points: the lowest and highest of each interval, so that spikes are kept."""
    if len(x) <= POINTS:
        return x, y
    width = math.ceil(len(x) / (POINTS // 2))
    kept: list[int] = []
    for start in range(0, len(x), width):
        stretch = range(start, min(start + width, len(x)))
        known = [i for i in stretch if y[i] is not None]
        if not known:
            kept.append(start)
            continue
        kept += sorted({min(known, key=lambda i: y[i] or 0.0), max(known, key=lambda i: y[i] or 0.0)})
    return [x[i] for i in kept], [y[i] for i in kept]


def curve(records: Records, key: str) -> Points:
    """Steps and values of the records that have a key. None (not finite) is a gap."""
    found = [r for r in records if key in r]
    return thinned([r["step"] for r in found], [r[key] for r in found])


# --- figures ----------------------------------------------------------------------------------------------------


def trace(run: Run, colour: str, points: Points, what: str, many: bool, **style: Any) -> dict[str, Any]:
    """One line of a figure, named by `what`, preceded by the run if there are several."""
    x, y = points
    name = html.escape(f"{run.name} {what}".strip() if many else what)
    mode = "lines+markers" if len(x) < 40 else "lines"
    line = {"color": colour, "width": 1.6} | style
    return {"x": x, "y": y, "name": name, "mode": mode, "line": line, "marker": {"size": 5}, "type": "scatter"}


def lines_figure(
    runs: list[Run],
    title: str,
    unit: str,
    parts: Iterable[tuple[str, str, str, dict[str, Any]]],
    limit: float = math.inf,
    **axis: Any,
) -> dict[str, Any] | None:
    """A figure over steps; None if no run has values.

    Args:
        parts: records ("steps", "validations", "tasks" or "rouge"), key, label and style of each line.
        limit: where the axis of values ends.
    """
    traces = []
    for i, run in enumerate(runs):
        for source, key, what, style in parts:
            points = curve(getattr(run, source), key)
            if any(value is not None for value in points[1]):
                colour = style.get("color", COLOURS[i % len(COLOURS)]) if len(runs) == 1 else COLOURS[i % len(COLOURS)]
                rest = {k: v for k, v in style.items() if k not in ("color", "errors")}
                traces.append(trace(run, colour, points, what, len(runs) > 1, **rest))
                if "errors" in style:
                    traces[-1] |= tasks.error_bars(getattr(run, source), style["errors"], points[0], colour)
    figure = {"title": title, "unit": unit, "traces": traces, "axis": axis, "marks": marks(runs)}
    return cut(figure, limit) if traces else None


def log_axis(runs: list[Run], key: str) -> dict[str, Any]:
    """A logarithmic axis. plotly labels a short one with single digits: 0.3 would be "3"."""
    values = [r[key] for run in runs for r in run.steps if (r.get(key) or 0.0) > 0]
    low, high = (math.floor(math.log10(f(values, default=1.0))) for f in (min, max))
    ticks = [digit * 10.0**n for n in range(low, high + 2, (high - low) // 8 + 1) for digit in (1, 2, 5)]
    ticks = ticks if high - low < 3 else ticks[::3]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def time_figure(runs: list[Run]) -> dict[str, Any] | None:
    """A bar per run with the time of each activity."""
    kinds: list[tuple[str, str, Callable[[Run], float]]] = [
        (
            "forward and backward",
            "#4c78a8",
            lambda r: _sum(r.steps, "seconds") - _sum(r.steps, "data_s", "optimizer_s"),
        ),
        ("optimizer", "#72b7b2", lambda r: _sum(r.steps, "optimizer_s")),
        ("waiting for data", "#e45756", lambda r: _sum(r.steps, "data_s")),
        ("validation", "#f58518", lambda r: _sum(r.validations + r.averages, "eval_s")),
        ("tasks", "#9d755d", lambda r: _sum(r.task_times, "task_s")),
        ("samples", "#b279a2", lambda r: _sum(r.samples, "seconds")),
        ("saving", "#54a24b", lambda r: _sum(r.saves, "save_s")),
    ]
    if not any(_sum(run.steps, "seconds") for run in runs):
        return None
    names = [html.escape(_shortened(run.name)) for run in runs]
    names = names if len(set(names)) == len(names) else [html.escape(run.name) for run in runs]
    traces = []
    for name, colour, seconds in kinds:
        values = [max(seconds(run), 0.0) for run in runs]
        if any(values):
            bar = {
                "x": values,
                "y": names,
                "name": name,
                "type": "bar",
                "orientation": "h",
                "marker": {"color": colour},
            }
            traces.append(bar)
    return {"title": "Where the time went", "unit": "seconds", "traces": traces, "axis": {}, "bars": True}


def _shortened(name: str) -> str:
    """A name that leaves room for a bar on a narrow screen."""
    return name if len(name) <= 16 else f"{name[:7]}..{name[-7:]}"


def _sum(records: Records, *keys: str) -> float:
    return sum(r.get(key) or 0.0 for r in records for key in keys)


def by_source(runs: list[Run]) -> list[str]:
    """The keys of validation losses of single sources."""
    keys = dict.fromkeys(key for run in runs for record in run.validations for key in record)
    return [key for key in keys if key.startswith(BY_SOURCE[0])]


def figures(runs: list[Run]) -> list[dict[str, Any]]:
    """All figures that have values."""
    dot = {"dash": "dot"}
    one = {"color": COLOURS[1]} if len(runs) == 1 else {}
    two = {"color": COLOURS[2]} if len(runs) == 1 else {"dash": "dash"}
    guessed = "unigram model" + (": each token guessed by its frequency alone" if len(runs) == 1 else "")
    unigram = {"color": "#888888", "width": 1.2} if len(runs) == 1 else {"width": 1}
    limit = ceiling(runs)
    ratios = [
        r["val_bits_per_byte"] / r["val_loss"]
        for run in runs
        for r in run.validations
        if r.get("val_bits_per_byte") and r["val_loss"]
    ]
    found = [
        lines_figure(
            *(runs, "Loss", "nats per token"),
            [
                ("steps", "mean_loss", "train", {}),
                ("validations", "val_loss", "validation", {"width": 2.4} | one),
                ("averages", "ema_val_loss", "validation of averaged weights", {"width": 2.4} | two),
            ],
            limit,
        ),
        lines_figure(
            *(runs, "Bits per byte", "bits per byte of held-out text"),
            [
                ("validations", "val_bits_per_byte", "validation", one),
                ("averages", "ema_val_bits_per_byte", "averaged weights", two),
                ("validations", "unigram_bits_per_byte", guessed, dot | unigram),
            ],
            limit * statistics.median(ratios) if ratios else math.inf,
        ),
        lines_figure(
            *(runs, "Validation loss by source", "nats per token"),
            [
                ("validations", key, key.partition("/")[2], {"color": COLOURS[i % len(COLOURS)], "dash": DASHES[i % 3]})
                for i, key in enumerate(by_source(runs))
            ],
            limit,
        ),
        lines_figure(
            *(runs, "ROUGE of answers to held-out pairs", "F-measure"),
            [("rouge", key, key.replace("rouge", "ROUGE-"), {"color": COLOURS[i]}) for i, key in enumerate(ROUGE)],
        ),
        tasks.with_chance(lines_figure(runs, "Tasks", "score", tasks.lines(runs)), runs),
        lines_figure(runs, "Learning rate", "", [("steps", "lr", "", {})], tickformat="~e"),
        lines_figure(
            runs, "Gradient norm, before clipping", "", [("steps", "grad_norm", "", {})], **log_axis(runs, "grad_norm")
        ),
        lines_figure(
            runs,
            "Throughput",
            "tokens per second",
            [("steps", "tokens_per_second", "", {})],
            rangemode="tozero",
        ),
        lines_figure(
            *(runs, "Peak memory of rank 0", "GiB"),
            [("steps", "peak_memory_gib", "", {})],
            rangemode="tozero",
        ),
        lines_figure(runs, "Loss scale (float16)", "", [("steps", "loss_scale", "", {})], type="log"),
        time_figure(runs),
    ]
    return [figure for figure in found if figure]


# --- the page ---------------------------------------------------------------------------------------------------


def page(runs: list[Run], reload_s: int = 0) -> str:
    """The page as HTML. With `reload_s`, an open page reloads itself every so many seconds."""
    shown = figures(runs)
    cells = "".join(_figure(i, figure) for i, figure in enumerate(shown))
    # in a script, "<!--<script>" would hide its end. json.dumps itself escapes all but ASCII
    data = json.dumps(shown, allow_nan=False).translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"})
    title = html.escape(", ".join(run.name for run in runs))
    parts = resources.files("torchtitan_lite.tools.report")
    style = parts.joinpath("report.css").read_text(encoding="utf-8")
    script = parts.joinpath("report.js").read_text(encoding="utf-8")
    body = [
        f"<header><h1>{title}</h1>{_legend(runs)}</header>",
        *(_summary(run, len(runs) > 1) for run in runs),
        f"<p class=note>{' '.join(map(html.escape, _notes(runs)))}</p>" if _notes(runs) else "",
        f"<main>{cells}</main>",
        _differences(runs),
        *(_changes(run, len(runs) > 1) for run in runs),
        *(_samples(run, len(runs) > 1) for run in runs),
        *(_config(run, len(runs) > 1) for run in runs),
    ]
    # the policy forbids all requests, even if text of a run got into the markup
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{f'<meta http-equiv=refresh content={reload_s}>' if reload_s else ''}"
        f"<title>{title}</title><style>{style}</style></head><body>{''.join(body)}"
        f'<script type="application/json" id="figures">{data}</script>'
        f"<script>{get_plotlyjs()}</script><script>{script}</script></body></html>\n"
    )


def _figure(number: int, figure: dict[str, Any]) -> str:
    """Title, unit and legend are HTML, which wraps on a narrow screen. report.js adds what a click does."""
    names = [] if len(figure["traces"]) == 1 else figure["traces"]
    chips = "".join(_legend_entry(i, trace) for i, trace in enumerate(names))
    unit = "" if figure.get("bars") else f" <small>{html.escape(figure['unit'])}</small>"
    caption = f"<b>{html.escape(figure['title'])}</b>{unit}"
    legend = f'<div class="legend">{chips}</div>' if chips else ""
    return f'<figure><figcaption>{caption}{legend}</figcaption><div class="plot" id="plot{number}"></div></figure>'


def _legend_entry(number: int, trace: dict[str, Any]) -> str:
    line = trace.get("line", {})
    style = {"dot": "dotted"}.get(line.get("dash", ""), "solid")
    colour = trace["marker"]["color"] if trace["type"] == "bar" else line["color"]
    width = 9 if trace["type"] == "bar" else max(round(line["width"] * 1.5), 2)
    swatch = f'<i style="border-top: {width}px {style} {colour}"></i>'
    return f'<button type=button data-trace="{number}">{swatch}{trace["name"]}</button>'  # the name is escaped


def _legend(runs: list[Run]) -> str:
    if len(runs) == 1:
        return f"<p>{html.escape(str(runs[0].folder))}</p>"
    coloured = ((COLOURS[i % len(COLOURS)], html.escape(str(run.folder))) for i, run in enumerate(runs))
    chips = (f'<span class="chip"><i style="background:{colour}"></i>{name}</span>' for colour, name in coloured)
    return f"<p>{''.join(chips)}</p>"


def _notes(runs: list[Run]) -> list[str]:
    notes = [f"{run.name}: {note}." for run in runs for note in run.notes]
    for run in runs:
        notes += spike_notes(run)
        if len(run.steps) > POINTS:
            notes.append(
                f"{run.name}: {len(run.steps):,} records, drawn as at most {POINTS:,} points per curve: the lowest and "
                "highest of each interval."
            )
        bad = [r["step"] for r in run.steps if r["loss"] is None]
        if bad:
            some = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
            notes.append(f"{run.name}: the loss was not finite at {counted(len(bad), 'recorded step')}: {some}.")
        if run.skipped:
            notes.append(
                f"{run.name}: {counted(len(run.skipped), 'step')} skipped, the first is {run.skipped[0]['step']}."
            )
    return notes


def _summary(run: Run, many: bool) -> str:
    """Tiles with the main results of a run."""
    last = run.steps[-1]
    losses = [r["mean_loss"] for r in run.steps if r["mean_loss"] is not None]
    rates = sorted(r["tokens_per_second"] for r in run.steps if r.get("tokens_per_second"))
    best = best_validation(run)
    of = run.about.get("steps") or run.config.get("train.steps", ("", ""))[0]  # older runs have the key only
    status, _, more = run.status.text.partition(", ")
    tiles = [
        ("status", status, more or run.about.get("reason", "").split("\n")[0]),
        ("step", f"{last['step']:,}", f"of {int(of):,}" if of.isdigit() else ""),
        ("training loss", f"{losses[-1]:.4f}" if losses else "not finite", "mean since the previous record"),
    ]
    if best is not None:
        tiles.append(("best validation loss", f"{best['val_loss']:.4f}", f"step {best['step']:,}"))
        if isinstance(best.get("val_bits_per_byte"), float):
            stderr = best.get("val_bits_per_byte_stderr")
            more = f"+- {stderr:.3f}" if isinstance(stderr, float) else "at that step"
            tiles.append(("bits per byte", f"{best['val_bits_per_byte']:.3f}", more))
    if run.rouge:
        newest = run.rouge[-1]
        values = " / ".join(f"{100 * newest[key]:.1f}" for key in ROUGE)
        tiles.append(("ROUGE-1 / 2 / Lsum", values, f"step {newest['step']:,}"))
    tiles += tasks.tiles(run)
    if last.get("tokens") is not None:
        tiles.append(("tokens", f"{last['tokens']:,}", ""))
    if rates:
        tiles.append(("tokens per second", f"{rates[len(rates) // 2]:,.0f}", "median"))
    times = [r["time"] for r in run.steps if r.get("time") is not None]
    if len(times) > 1:
        tiles.append(("first to last record", duration(times[-1] - times[0]), ""))
    cells = "".join(
        f"<div><span>{html.escape(label)}</span><b>{html.escape(str(value))}</b><small>{html.escape(str(more))}</small></div>"
        for label, value, more in tiles
    )
    name = f"<h3>{html.escape(run.name)}</h3>" if many else ""
    return f'{name}<section class="tiles">{cells}</section>'


def _differences(runs: list[Run]) -> str:
    if len(runs) == 1:
        return ""
    rows = []
    for key in differing_keys(runs):
        values = [run.config.get(key, ("-", ""))[0] for run in runs]
        cells = "".join(f"<td><code>{html.escape(value)}</code></td>" for value in values)
        rows.append(f"<tr><th>{html.escape(key)}</th>{cells}</tr>")
    if not rows:
        return "<section><h2>Differences of the configs</h2><p>none</p></section>"
    heads = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    return (
        f"<section><h2>Differences of the configs</h2>{_table(f'<tr><th></th>{heads}</tr>' + ''.join(rows))}</section>"
    )


def _changes(run: Run, many: bool) -> str:
    """What resumes have changed. The figures mark these steps."""
    rows = "".join(
        f"<tr><td>{step:,}</td><th>{html.escape(key)}</th><td><code>{html.escape(before)}</code></td>"
        f"<td><code>{html.escape(now)}</code></td></tr>"
        for step, key, before, now in changes_of(run)
    )
    of = f" of {html.escape(run.name)}" if many else ""
    heads = "<tr><th>after step</th><th>key</th><th>before</th><th>from then on</th></tr>"
    return f"<section><h2>Changed on a resume{of}</h2>{_table(heads + rows)}</section>" if rows else ""


def _table(rows: str, kind: str = "plain") -> str:
    return f'<div class=scroll><table class="{kind}">{rows}</table></div>'


def _samples(run: Run, many: bool) -> str:
    if not run.samples:
        return ""
    prompts: dict[str, Records] = {}
    for sample in run.samples:
        prompts.setdefault(sample["prompt"], []).append(sample)
    blocks = []
    for prompt, samples in prompts.items():
        targets = [s["reference"] for s in samples if isinstance(s.get("reference"), str)]
        begin = "" if targets else f"<mark>{html.escape(prompt)}</mark>"  # an answer to it, not its continuation
        target = f"<p>target: <code>{html.escape(targets[-1])}</code></p>" if targets else ""
        shown = samples
        if len(samples) > SAMPLES:  # evenly spaced, including the first and the last
            shown = [samples[round(i * (len(samples) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)]
        rows = "".join(
            f"<tr><th>{s['step']:,}</th><td><pre>{begin}{html.escape(s['text'])}</pre></td></tr>"
            for s in reversed(shown)
        )
        fewer = f" ({len(shown)} of {len(samples)})" if len(shown) < len(samples) else ""
        blocks.append(
            f"<h3><code>{html.escape(prompt)}</code>{fewer}</h3>{target}<div class=scroll><table>{rows}</table></div>"
        )
    of = f" of {html.escape(run.name)}" if many else ""
    return f"<section><h2>Samples{of}, the latest first</h2>{''.join(blocks)}</section>"


def _config(run: Run, many: bool) -> str:
    if not run.config:
        return ""
    rows = "".join(
        f'<tr class="{"default" if origin == "default" else "set"}"><th>{html.escape(key)}</th>'
        f"<td><code>{html.escape(value)}</code></td><td>{html.escape(origin)}</td></tr>"
        for key, (value, origin) in run.config.items()
    )
    of = f" of {html.escape(run.name)}" if many else ""
    return (
        f"<section><h2>Config{of}</h2><label><input type=checkbox class=all> with defaults</label>"
        + _table(f"<tr><th>key</th><th>value</th><th>from</th></tr>{rows}", "config")
        + "</section>"
    )
