"""The page of the report: PANELS, in the order of the page. A panel is a function of the runs that returns HTML, the
data of a figure, or None. All text of a run is escaped.
"""

import html
import json
from collections.abc import Callable, Iterable
from importlib import resources

from plotly.offline import get_plotlyjs

from torchtitan_lite.terminal import counted, duration
from torchtitan_lite.tools.records import ROUGE, TASK, Records
from torchtitan_lite.tools.report import figures, table
from torchtitan_lite.tools.report.figures import COLOURS, POINTS, Figure
from torchtitan_lite.tools.report.runs import Run

SAMPLES = 12  # per prompt
_TASK_TILES = 6  # of a run
# the classes of report.css that colour a status, by its first word
_STATUS = {"starting": "live", "running": "live", "complete": "good", "preempted": "warn", "failed": "bad"}
# the policy forbids all requests, even if text of a run got into the markup
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"

Panel = Callable[[list[Run]], Figure | str | None]


def page(runs: list[Run], reload_s: int = 0) -> str:
    """The page as HTML. With `reload_s`, an open page reloads itself every so many seconds."""
    shown: list[Figure] = []
    panels = []
    for panel in PANELS:
        content = panel(runs)
        if isinstance(content, dict):
            shown.append(content)
            content = _figure(len(shown) - 1, content, many=len(runs) > 1)
        panels.append(content or "")
    curves = [
        figures.axes(run)
        | {"color": figures.GREY if len(runs) == 1 else _colour(runs, run), "marks": figures.marks(run)}
        for run in runs
    ]
    # in a script, "<!--<script>" would hide its end. json.dumps itself escapes all but ASCII
    data = json.dumps({"runs": curves, "figures": shown}, allow_nan=False)
    data = data.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"})
    files = resources.files("torchtitan_lite.tools.report")
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{f'<meta http-equiv=refresh content={reload_s}>' if reload_s else ''}"
        f"<title>{_names(runs)}</title><style>{style}</style></head><body><main>{''.join(panels)}</main>"
        f'<script type="application/json" id="data">{data}</script>'
        f"<script>{get_plotlyjs()}</script><script>{script}</script></body></html>\n"
    )


def _figure(number: int, content: Figure, *, many: bool) -> str:
    """Title, unit and legend are HTML, which wraps on a narrow screen. The toolbar has the colours of several runs."""
    lines = {trace["label"]: trace for trace in content["traces"]}
    entries = "".join(
        f'<button type=button data-label="{label}"><i style="border-top: {max(round(line["width"] * 1.5), 2)}px '
        f"{'solid' if line['dash'] == 'solid' else 'dotted' if line['dash'] == 'dot' else 'dashed'} "
        f'{"currentColor" if many else line["color"]}"></i>{label}</button>'  # the label is escaped
        for label, line in lines.items()
        if len(lines) > 1
    )
    legend = f'<div class="legend">{entries}</div>' if entries else ""
    caption = f"<b>{html.escape(content['title'])}</b> <small>{html.escape(content['unit'])}</small>{legend}"
    return f'<figure><figcaption>{caption}</figcaption><div class="plot" id="plot{number}"></div></figure>'


def _names(runs: list[Run]) -> str:
    return html.escape(", ".join(run.name for run in runs))


def _colour(runs: list[Run], run: Run) -> str:
    return COLOURS[runs.index(run) % len(COLOURS)]


def _swatch(colour: str) -> str:
    return f'<i class="swatch" style="background: {colour}"></i>'


def _table(head: Iterable[str], rows: Iterable[str], kind: str = "plain") -> str:
    """Cells and rows are HTML."""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<div class=scroll><table class="{kind}"><tr>{heads}</tr>{"".join(rows)}</table></div>'


def _of(run: Run, runs: list[Run]) -> str:
    return f" of {_swatch(_colour(runs, run))}{html.escape(run.name)}" if len(runs) > 1 else ""


# --- the top of the page ------------------------------------------------------------------------------------------


def heading(runs: list[Run]) -> str:
    if len(runs) > 1:
        return f"<header><h1>{len(runs)} runs</h1><p>the lowest validation loss first</p></header>"
    where = html.escape(str(runs[0].folder))
    return f"<header><h1>{_names(runs)}</h1><p>{where}</p><div>{_status(runs[0], runs)}</div></header>"


def comparison(runs: list[Run]) -> str:
    """The table of several runs: the keys that differ, then the results."""
    if len(runs) == 1:
        return ""
    rows = []
    found = table.rows(runs)
    keys = [key for key in found[0][1] if key not in table.RESULTS]
    for run, cells in found:
        best = found[0][0].best is not None and run is found[0][0]
        shown = [f"<td><code>{html.escape(cells[key])}</code></td>" for key in keys]
        shown += [f"<td>{html.escape(cells[column])}</td>" for column in table.RESULTS[1:-1]]
        name = f"{_swatch(_colour(runs, run))}<a href=#run{runs.index(run)}>{html.escape(run.name)}</a>"
        name += " <span class=star title='the lowest validation loss'>&#9733; best</span>" if best else ""
        rows.append(
            f"<tr{' class=best' if best else ''}><th>{name}</th>{''.join(shown)}<td>{_status(run, runs)}</td></tr>"
        )
    head = map(html.escape, ["run", *keys, *table.RESULTS[1:]])
    same = "" if keys else "<p class=note>The configs of the runs do not differ.</p>"
    return f"<section class=runs>{_table(head, rows)}{same}</section>"


def _status(run: Run, runs: list[Run]) -> str:
    """The status in its colour, and whether the loss has diverged."""
    text = run.status.text
    kind = "bad" if text.startswith("stopped") else _STATUS.get(text.split(" ")[0], "unknown")
    word, _, more = text.partition(", ")
    shown = f'<b class="status {kind}">{html.escape(word)}</b>'
    if figures.diverged(run, figures.ceiling(runs)):
        shown += '<b class="status bad">diverged</b>'
    more = more or run.about.get("reason", "").split("\n")[0]
    return shown + (f"<small>{html.escape(more)}</small>" if more else "")


def summary(runs: list[Run]) -> str:
    """The tiles of a single run."""
    return _tiles(runs[0]) if len(runs) == 1 else ""


def _tiles(run: Run) -> str:
    """The main results of a run."""
    last = run.steps[-1]
    of = f"of {int(run.n_steps):,}" if run.n_steps.isdigit() else ""
    loss = f"{run.losses[-1]:.4f}" if run.losses else "not finite"
    tiles = [("step", f"{last['step']:,}", of), ("training loss", loss, "mean since the previous record")]
    if run.best is not None:
        tiles.append(("best validation loss", f"{run.best['val_loss']:.4f}", f"step {run.best['step']:,}"))
        bits, stderr = run.best.get("val_bits_per_byte"), run.best.get("val_bits_per_byte_stderr")
        if bits is not None:
            tiles.append(("bits per byte", f"{bits:.3f}", "at that step" if stderr is None else f"+- {stderr:.3f}"))
    if run.rouge:
        scores = " / ".join(f"{100 * run.rouge[-1][key]:.1f}" for key in ROUGE)
        tiles.append(("ROUGE-1 / 2 / Lsum", scores, f"step {run.rouge[-1]['step']:,}"))
    for name in figures.task_names([run])[:_TASK_TILES]:
        newest = [r for r in run.tasks if TASK[0] + name in r][-1]
        score, stderr, chance = (newest.get(key + name) for key in TASK)
        more = ([] if stderr is None else [f"+- {stderr:.3f}"]) + ([] if chance is None else [f"chance {chance:.3f}"])
        tiles.append((f"task {name}", "not finite" if score is None else f"{score:.3f}", "; ".join(more)))
    if last.get("tokens") is not None:
        tiles.append(("tokens", f"{last['tokens']:,}", ""))
    if rates := sorted(r["tokens_per_second"] for r in run.steps if r.get("tokens_per_second")):
        tiles.append(("tokens per second", f"{rates[len(rates) // 2]:,.0f}", "median"))
    times = [r["time"] for r in run.steps if r.get("time") is not None]
    if len(times) > 1:
        tiles.append(("first to last record", duration(times[-1] - times[0]), ""))
    cells = "".join(
        f"<div><span>{html.escape(label)}</span><b>{html.escape(value)}</b><small>{html.escape(more)}</small></div>"
        for label, value, more in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def notes(runs: list[Run]) -> str:
    sentences = []
    for run in runs:
        found = [*run.notes]
        if run.spikes:
            found.append(f"{counted(len(run.spikes), 'loss spike')}, the first at step {run.spikes[0]['step']}")
        if run.rewinds:
            last = run.rewinds[-1]  # marks of earlier ones may have been abandoned, too
            found.append(
                f"{counted(last['rewind'], 'rewind')}, the last from step {last['rewound_from']} to "
                f"{last['step'] - 1}; what was abandoned is in spikes.jsonl"
            )
        if len(run.steps) > POINTS:
            found.append(
                f"{len(run.steps):,} records, drawn as at most {POINTS:,} points per curve: the lowest and highest of "
                "each interval"
            )
        if bad := [r["step"] for r in run.steps if r["loss"] is None]:
            some = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
            found.append(f"the loss was not finite at {counted(len(bad), 'recorded step')}: {some}")
        if run.skipped:
            found.append(f"{counted(len(run.skipped), 'step')} skipped, the first is {run.skipped[0]['step']}")
        sentences += [html.escape(f"{run.name}: {note}.") for note in found]
    return f"<p class=note>{' '.join(sentences)}</p>" if sentences else ""


def toolbar(runs: list[Run]) -> str:
    """The choices that report.js applies, and a button for each run."""
    chips = "".join(
        f"<button type=button data-run={i}>{_swatch(_colour(runs, run))}{html.escape(run.name)}</button>"
        for i, run in enumerate(runs)
        if len(runs) > 1
    )
    return (
        "<noscript><p class=note>The curves need JavaScript.</p></noscript><nav hidden>"
        "<label>x axis <select id=x><option value=step>steps<option value=tokens>tokens<option value=time>training time"
        "</select></label><label title='half-life in % of all steps'>smoothing "
        "<input id=smooth type=range min=0 max=10 step=0.5 value=0>"
        "<output id=span></output></label><button type=button id=reset hidden>reset zoom</button>"
        f"{f'<div class=legend>{chips}</div>' if chips else ''}</nav>"
    )


# --- below the figures --------------------------------------------------------------------------------------------


def time_spent(runs: list[Run]) -> str:
    """Where the time went: a bar for each run, and a table."""
    spent = [seconds_of(run) for run in runs]
    if not any(sum(seconds.values()) for seconds in spent):
        return ""
    kinds = [kind for kind in spent[0] if any(seconds[kind] for seconds in spent)]
    colours = dict(zip(spent[0], COLOURS, strict=False))
    longest = max(sum(seconds.values()) for seconds in spent)
    bars = "".join(
        (f"<small>{_swatch(_colour(runs, run))}{html.escape(run.name)}</small>" if len(runs) > 1 else "")
        + "<div class=bar>"
        + "".join(f"<i style='width: {100 * seconds[k] / longest:.3f}%; background: {colours[k]}'></i>" for k in kinds)
        + "</div>"
        for run, seconds in zip(runs, spent, strict=True)
    )
    rows = []
    for kind in kinds:
        cells = "".join(
            f"<td>{f'{s[kind]:.1f}s' if s[kind] < 9.95 else duration(s[kind])}</td>"
            f"<td>{100 * s[kind] / (sum(s.values()) or 1):.1f} %</td>"
            for s in spent
        )
        rows.append(f"<tr><th>{_swatch(colours[kind])}{kind}</th>{cells}</tr>")
    if len(runs) == 1:
        table_of_times = f"<table>{''.join(rows)}</table>"
    else:
        heads = "".join(f"<th colspan=2>{html.escape(run.name)}</th>" for run in runs)
        table_of_times = f"<div class=scroll><table><tr><th></th>{heads}</tr>{''.join(rows)}</table></div>"
    return f"<figure><figcaption><b>Where the time went</b></figcaption>{bars}{table_of_times}</figure>"


def seconds_of(run: Run) -> dict[str, float]:
    """The seconds of each activity of a run."""
    training = _sum(run.steps, "seconds") - _sum(run.steps, "data_s", "optimizer_s")
    return {
        "forward and backward": max(training, 0.0),
        "validation": _sum(run.validations + run.averages, "eval_s"),
        "saving": _sum(run.saves, "save_s"),
        "samples": _sum(run.samples, "seconds"),
        "waiting for data": _sum(run.steps, "data_s"),
        "optimizer": _sum(run.steps, "optimizer_s"),
        "tasks": _sum(run.task_times, "task_s"),
    }


def _sum(records: Records, *keys: str) -> float:
    return max(sum(r.get(key) or 0.0 for r in records for key in keys), 0.0)


def cards(runs: list[Run]) -> str:
    """The tiles of several runs."""
    return "".join(
        f"<section id=run{i}><h2>{_swatch(_colour(runs, run))}{html.escape(run.name)} "
        f"<small>{html.escape(str(run.folder))}</small></h2><div>{_status(run, runs)}</div>{_tiles(run)}</section>"
        for i, run in enumerate(runs)
        if len(runs) > 1
    )


def changes(runs: list[Run]) -> str:
    """What resumes have changed. The figures mark these steps."""
    head = ["after step", "key", "before", "from then on"]
    return "".join(
        f"<section><h2>Changed on a resume{_of(run, runs)}</h2>"
        + _table(
            head,
            (
                f"<tr><td>{step:,}</td><th>{html.escape(key)}</th><td><code>{html.escape(before)}</code></td>"
                f"<td><code>{html.escape(now)}</code></td></tr>"
                for step, key, before, now in run.changes
            ),
        )
        + "</section>"
        for run in runs
        if run.changes
    )


def samples(runs: list[Run]) -> str:
    """The texts of each prompt, the latest first."""
    sections = []
    for run in runs:
        by_prompt: dict[str, Records] = {}
        for sample in run.samples:
            by_prompt.setdefault(sample["prompt"], []).append(sample)
        blocks = "".join(_samples_of(prompt, found) for prompt, found in by_prompt.items())
        if blocks:
            sections.append(f"<section><h2>Samples{_of(run, runs)}, the latest first</h2>{blocks}</section>")
    return "".join(sections)


def _samples_of(prompt: str, found: Records) -> str:
    """With a target the text is an answer to the prompt, otherwise its continuation."""
    targets = [s["reference"] for s in found if isinstance(s.get("reference"), str)]
    target = f"<p>target: <code>{html.escape(targets[-1])}</code></p>" if targets else ""
    begin = "" if targets else f"<mark>{html.escape(prompt)}</mark>"
    shown = found
    if len(found) > SAMPLES:  # evenly spaced, including the first and the last
        shown = [found[round(i * (len(found) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)]
    fewer = f" ({len(shown)} of {len(found)})" if len(shown) < len(found) else ""
    rows = "".join(
        f"<tr><th>{s['step']:,}</th><td><pre>{begin}{html.escape(s['text'])}</pre></td></tr>" for s in reversed(shown)
    )
    return f"<h3><code>{html.escape(prompt)}</code>{fewer}</h3>{target}<div class=scroll><table>{rows}</table></div>"


def config(runs: list[Run]) -> str:
    """The values that were set, and on a click the defaults, with their origins."""
    return "".join(
        f"<section><h2>Config{_of(run, runs)}</h2><label><input type=checkbox class=all> with defaults</label>"
        + _table(
            ["key", "value", "from"],
            (
                f'<tr class="{"default" if origin == "default" else "set"}"><th>{html.escape(key)}</th>'
                f"<td><code>{html.escape(value)}</code></td><td>{html.escape(origin)}</td></tr>"
                for key, (value, origin) in run.config.items()
            ),
            "config",
        )
        + "</section>"
        for run in runs
        if run.config
    )


PANELS: list[Panel] = [
    heading,
    comparison,
    summary,
    notes,
    toolbar,
    figures.loss,
    figures.bits_per_byte,
    figures.loss_by_source,
    figures.rouge,
    figures.tasks,
    figures.learning_rate,
    figures.gradient_norm,
    figures.throughput,
    figures.memory,
    figures.loss_scale,
    time_spent,
    cards,
    changes,
    samples,
    config,
]
