"""The page of the report: PANELS, in the order of the page. A panel is a function of the runs that returns HTML, the
data of a figure, or None. All text of a run is escaped.
"""

import json
from collections.abc import Callable, Iterable
from html import escape
from importlib import resources

from plotly.offline import get_plotlyjs

from torchtitan_lite.terminal import counted, duration
from torchtitan_lite.tools.report import figures, table
from torchtitan_lite.tools.report.figures import COLOURS, GREY, POINTS, Figure
from torchtitan_lite.tools.report.runs import TASK, Records, Run

SAMPLES = 12  # per prompt
_TASK_TILES = 6  # of a run
# the classes of report.css that colour a status, by its first word
_STATUS = {
    **{"starting": "live", "running": "live", "complete": "good", "preempted": "warn"},
    **{"failed": "bad", "stopped": "bad"},
}
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
        figures.axes(run) | {"color": GREY if len(runs) == 1 else _colour(runs, run), "marks": figures.marks(run)}
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
        f"{f'<meta http-equiv=refresh content={reload_s}>' if reload_s else ''}<title>{_names(runs)}</title>"
        f"<style>{style}</style></head><body><main>{''.join(panels)}</main>"
        f'<script type="application/json" id="data">{data}</script>'
        f"<script>{get_plotlyjs()}</script><script>{script}</script></body></html>\n"
    )


def _figure(number: int, figure: Figure, *, many: bool) -> str:
    """Title, unit and legend are HTML, which wraps on a narrow screen. The toolbar has the colours of several runs."""
    entries = []
    for label, line in {trace["label"]: trace for trace in figure["traces"]}.items():
        style = {"solid": "solid", "dot": "dotted"}.get(line["dash"], "dashed")
        border = f"{max(round(1.5 * line['width']), 2)}px {style} {'currentColor' if many else line['color']}"
        swatch = f'<i style="border-top: {border}"></i>'
        entries.append(f'<button type=button data-label="{label}">{swatch}{label}</button>')  # the label is escaped
    legend = f'<div class="legend">{"".join(entries)}</div>' if len(entries) > 1 else ""
    caption = f"<b>{escape(figure['title'])}</b> <small>{escape(figure['unit'])}</small>{legend}"
    return f'<figure><figcaption>{caption}</figcaption><div class="plot" id="plot{number}"></div></figure>'


def _names(runs: list[Run]) -> str:
    return escape(", ".join(run.name for run in runs))


def _colour(runs: list[Run], run: Run) -> str:
    return COLOURS[runs.index(run) % len(COLOURS)]


def _swatch(colour: str) -> str:
    return f'<i class="swatch" style="background: {colour}"></i>'


def _coloured(runs: list[Run], run: Run) -> str:
    """The name of a run, and its colour where there are several."""
    return (_swatch(_colour(runs, run)) if len(runs) > 1 else "") + escape(run.name)


def _table(head: Iterable[str], rows: Iterable[str]) -> str:
    """Cells and rows are HTML."""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    return f"<div class=scroll><table><tr>{heads}</tr>{''.join(rows)}</table></div>"


def _row(name: str, *cells: str, kind: str = "") -> str:
    return f'<tr class="{kind}"><th>{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


# --- the top of the page ------------------------------------------------------------------------------------------


def heading(runs: list[Run]) -> str:
    if len(runs) > 1:
        return f"<header><h1>{len(runs)} runs</h1><p>the lowest validation loss first</p></header>"
    where = escape(str(runs[0].folder))
    return f"<header><h1>{_names(runs)}</h1><div>{_status(runs, runs[0])}</div><p>{where}</p></header>"


def comparison(runs: list[Run]) -> str:
    """The table of several runs: the keys that differ, then the results."""
    if len(runs) == 1:
        return ""
    rows = []
    for i, (run, cells) in enumerate(table.rows(runs)):
        keys = [key for key in cells if key not in table.RESULTS]
        best = i == 0 and run.best is not None
        name = f"<a href=#run{runs.index(run)}>{_coloured(runs, run)}</a>"
        name += " <span class=star title='the lowest validation loss'>&#9733; best</span>" if best else ""
        results = [escape(cells[column]) for column in table.RESULTS[1:-1]]
        shown = [*(_code(cells[key]) for key in keys), *results, _status(runs, run)]
        rows.append(_row(name, *shown, kind="best" if best else ""))
    head = map(escape, ["run", *keys, *table.RESULTS[1:]])
    same = "" if keys else "<p class=note>The configs of the runs do not differ.</p>"
    return f"<section class=runs>{_table(head, rows)}{same}</section>"


def _status(runs: list[Run], run: Run) -> str:
    """The status in its colour, its reason, and whether the loss has diverged."""
    word, _, more = run.status.text.partition(", ")
    shown = f'<b class="status {_STATUS.get(word.split(" ")[0], "unknown")}">{escape(word)}</b>'
    if figures.diverged(run, figures.ceiling(runs)):
        shown += '<b class="status bad">diverged</b>'
    more = more or run.reason
    return shown + (f"<small>{escape(more)}</small>" if more else "")


def summary(runs: list[Run]) -> str:
    return _tiles(runs[0]) if len(runs) == 1 else ""


def _tiles(run: Run) -> str:
    last = run.steps[-1]
    of = f"of {int(run.n_steps):,}" if run.n_steps.isdigit() else ""
    loss = f"{run.losses[-1]:.4f}" if run.losses else "not finite"
    tiles = [
        ("step", f"{last['step']:,}", of),
        ("training loss", loss, f"{figures.NATS}, mean since the last multiple of log.every"),
    ]
    if run.best is not None:
        tiles.append(
            ("best validation loss", f"{run.best['val_loss']:.4f}", f"{figures.NATS}, step {run.best['step']:,}")
        )
        bits, stderr = run.best.get("val_bits_per_byte"), run.best.get("val_bits_per_byte_stderr")
        if bits is not None:
            tiles.append(("bits per byte", f"{bits:.3f}", "at that step" if stderr is None else f"+- {stderr:.3f}"))
    for name in figures.task_names([run])[:_TASK_TILES]:
        newest = run.having(TASK[0] + name)[-1]
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
    share, whole_s = run.goodput
    if whole_s:
        tiles.append(("goodput", f"{share:.1%}", f"of {duration(whole_s)} since the first launch"))
    cells = "".join(
        f"<div><span>{escape(label)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>"
        for label, value, more in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def notes(runs: list[Run]) -> str:
    sentences = []
    for run in runs:
        found = [*run.notes]
        if spikes := run.having("spike"):
            found.append(f"{counted(len(spikes), 'loss spike')}, the first at step {spikes[0]['step']}")
        if len(run.steps) > POINTS:
            found.append(
                f"{len(run.steps):,} records, drawn as at most {POINTS:,} points per curve: the lowest and highest of "
                "each interval"
            )
        if bad := [r["step"] for r in run.steps if r["loss"] is None]:
            some = ", ".join(map(str, bad[:8])) + (", ..." if len(bad) > 8 else "")
            found.append(f"the loss was not finite at {counted(len(bad), 'recorded step')}: {some}")
        if skipped := run.having("skipped_samples"):
            found.append(f"{counted(len(skipped), 'step')} skipped, the first is {skipped[0]['step']}")
        sentences += [escape(f"{run.name}: {note}.") for note in found]
    return f"<p class=note>{' '.join(sentences)}</p>" if sentences else ""


def toolbar(runs: list[Run]) -> str:
    """The choices that report.js applies, and a button for each run."""
    buttons = [f"<button type=button data-run={i}>{_coloured(runs, run)}</button>" for i, run in enumerate(runs)]
    legend = f"<div class=legend>{''.join(buttons)}</div>" if len(runs) > 1 else ""
    return (
        "<noscript><p class=note>The curves need JavaScript.</p></noscript><nav hidden>"
        "<label>x axis <select id=x><option value=step>steps<option value=tokens>tokens<option value=time>training time"
        "</select></label><label title='half-life in % of all steps'>smoothing "
        "<input id=smooth type=range min=0 max=10 step=0.5 value=0><output id=span></output></label>"
        f"<button type=button id=reset hidden>reset zoom</button>{legend}</nav>"
    )


# --- below the figures --------------------------------------------------------------------------------------------


def time_spent(runs: list[Run]) -> str:
    """Where the time went: a bar for each run, and a table."""
    spent = [seconds_of(run) for run in runs]
    longest = max(sum(seconds.values()) for seconds in spent)
    if not longest:
        return ""
    colours = dict(zip(spent[0], COLOURS, strict=False))
    kinds = [kind for kind in spent[0] if any(seconds[kind] for seconds in spent)]
    bars = ""
    for run, seconds in zip(runs, spent, strict=True):
        parts = (f"width: {100 * seconds[kind] / longest:.3f}%; background: {colours[kind]}" for kind in kinds)
        bars += f"<small>{_coloured(runs, run)}</small>" if len(runs) > 1 else ""
        bars += "<div class=bar>" + "".join(f'<i style="{part}"></i>' for part in parts) + "</div>"
    rows = [_row(_swatch(colours[kind]) + kind, *(_share(seconds, kind) for seconds in spent)) for kind in kinds]
    head = ["", *(escape(run.name) for run in runs if len(runs) > 1)]
    return f"<figure><figcaption><b>Where the time went</b></figcaption>{bars}{_table(head, rows)}</figure>"


def _share(spent: dict[str, float], kind: str) -> str:
    seconds = spent[kind]
    shown = f"{seconds:.1f}s" if seconds < 9.95 else duration(seconds)
    return f"{shown} <small>{100 * seconds / (sum(spent.values()) or 1):.1f} %</small>"


def seconds_of(run: Run) -> dict[str, float]:

    def total(key: str, records: Records = run.records) -> float:
        return max(sum(r.get(key) or 0.0 for r in records), 0.0)

    data, optimizer = total("data_s", run.steps), total("optimizer_s", run.steps)
    return {
        "forward and backward": max(total("seconds", run.steps) - data - optimizer, 0.0),
        "validation": total("eval_s"),
        "saving": total("save_s"),
        "samples": total("seconds", run.samples),
        "waiting for data": data,
        "optimizer": optimizer,
        "tasks": total("task_s"),
    }


def cards(runs: list[Run]) -> str:
    return "".join(
        f"<section id=run{i}><h2>{_coloured(runs, run)} <small>{escape(str(run.folder))}</small></h2>"
        f"<div>{_status(runs, run)}</div>{_tiles(run)}</section>"
        for i, run in enumerate(runs)
        if len(runs) > 1
    )


def section(title: str, content: Callable[[Run], str]) -> Panel:
    """A panel with a section for each run that has this content."""

    def panel(runs: list[Run]) -> str:
        parts = [(run, content(run)) for run in runs]
        of = {run.folder: f" of {_coloured(runs, run)}" if len(runs) > 1 else "" for run in runs}
        return "".join(f"<section><h2>{title}{of[run.folder]}</h2>{part}</section>" for run, part in parts if part)

    return panel


def changes(run: Run) -> str:
    """What resumes have changed. The figures mark these steps."""
    rows = [_row(f"{step:,}", escape(key), _code(before), _code(now)) for step, key, before, now in run.changes]
    return _table(["after step", "key", "before", "from then on"], rows) if rows else ""


def samples(run: Run) -> str:
    """The texts of each prompt, the latest first. With a target, they answer the prompt; otherwise they continue it."""
    by_prompt: dict[str, Records] = {}
    for sample in run.samples:
        by_prompt.setdefault(sample["prompt"], []).append(sample)
    blocks = ""
    for prompt, records in by_prompt.items():
        shown = records
        if len(records) > SAMPLES:  # evenly spaced, including the first and the last
            shown = [records[round(i * (len(records) - 1) / (SAMPLES - 1))] for i in range(SAMPLES)]
        fewer = f" ({len(shown)} of {len(records)})" if len(shown) < len(records) else ""
        targets = [s["reference"] for s in records if isinstance(s.get("reference"), str)]
        target = f"<p>target: {_code(targets[-1])}</p>" if targets else ""
        begin = "" if targets else f"<mark>{escape(prompt)}</mark>"
        rows = [_row(f"{s['step']:,}", f"<pre>{begin}{escape(s['text'])}</pre>") for s in reversed(shown)]
        blocks += f"<h3>{_code(prompt)}{fewer}</h3>{target}{_table([], rows)}"
    return blocks


def config(run: Run) -> str:
    """The values that were set, and on a click the defaults, with their origins."""
    rows = [
        _row(escape(key), _code(value), escape(origin), kind="default" if origin == "default" else "set")
        for key, (value, origin) in run.config.items()
    ]
    toggle = "<label><input type=checkbox> with defaults</label>"
    return toggle + _table(["key", "value", "from"], rows) if rows else ""


PANELS: list[Panel] = [
    *(heading, comparison, summary, notes, toolbar),
    *(figures.loss, figures.bits_per_byte, figures.loss_by_source, figures.tasks),
    *(figures.learning_rate, figures.gradient_norm, figures.throughput, figures.memory, figures.loss_scale),
    *(time_spent, cards),
    *(
        section("Changed on a resume", changes),
        section("Samples, the latest first", samples),
        section("Config", config),
    ),
]
