"""Writes the page of the report: results, curves (figure.py), times, changes, samples and configs of the runs.

All text of a run is escaped.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources

from torchtitan_lite.terminal import duration
from torchtitan_lite.tools.report.figure import COLOURS, figure
from torchtitan_lite.tools.report.runs import RESULTS, Records, Run, rows

SAMPLES = 12  # per prompt
_TASK_TILES = 6
# the report.css class of a status, by its first word
_STATUS = {
    **{"starting": "live", "running": "live", "complete": "good", "preempted": "warn"},
    **{"failed": "bad", "stopped": "bad"},
}
# forbid all requests, even if text of a run got into the markup
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def page(runs: Sequence[Run]) -> str:
    """Return the page as HTML."""
    names = escape(", ".join(run.name for run in runs))
    style = resources.files("torchtitan_lite.tools.report").joinpath("report.css").read_text(encoding="utf-8")
    curves = figure(runs).to_html(
        full_html=False,
        include_plotlyjs=True,
        div_id="curves",
        config={"responsive": True, "displaylogo": False, "modeBarButtons": [["toImage", "zoom2d", "pan2d"]]},
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{names}</title><style>{style}</style></head><body><main>{_head(runs)}"
        f"<div class=scroll>{curves}</div>{_times(runs)}"
        f"{_sections(runs, 'Changed on a resume', _changes)}{_sections(runs, 'Samples, the latest first', _samples)}"
        f"{_sections(runs, 'Config', _config)}</main></body></html>\n"
    )


def _head(runs: Sequence[Run]) -> str:
    """Return one run's status and tiles, or the table of several runs: differing keys, then results."""
    if len(runs) == 1:
        where = escape(str(runs[0].folder))
        return f"<h1>{escape(runs[0].name)} {_status(runs[0])}</h1><p class=note>{where}</p>{_tiles(runs[0])}"
    lines = []
    for run, cells in rows(runs):
        keys = [key for key in cells if key not in RESULTS]
        shown = [*(_code(cells[key]) for key in keys), *(escape(cells[column]) for column in RESULTS[1:-1])]
        lines.append(_row(_named(runs, run), *shown, _status(run)))
    same = "" if keys else "<p class=note>The configs of the runs do not differ.</p>"
    title = f"<h1>{len(runs)} runs</h1><p class=note>the lowest validation loss first</p>"
    return f"{title}{_table(['run', *map(escape, keys), *RESULTS[1:]], lines)}{same}"


def _status(run: Run) -> str:
    word, _, more = run.status.text.partition(", ")
    more = more or run.reason
    shown = f'<b class="status {_STATUS.get(word.split(" ")[0], "")}">{escape(word)}</b>'
    return shown + (f"<small>{escape(more)}</small>" if more else "")


def _tiles(run: Run) -> str:
    last = run.steps[-1]
    loss = "not finite" if last["mean_loss"] is None else f"{last['mean_loss']:.4f}"
    tiles = [
        ("step", f"{last['step']:,}", f"of {run.config['train.steps']:,}"),
        ("training loss", loss, "nats per token"),
    ]
    if best := run.best:
        tiles.append(("best validation loss", f"{best['val_loss']:.4f}", f"step {best['step']:,}"))
        bits, stderr = best.get("val_bits_per_byte"), best.get("val_bits_per_byte_stderr")
        if bits is not None:
            tiles.append(("bits per byte", f"{bits:.3f}", "" if stderr is None else f"+- {stderr:.3f}"))
    for key in [key for key in _keys(run) if key.startswith("task/")][:_TASK_TILES]:
        name, newest = key.removeprefix("task/"), run.having(key)[-1]
        score, stderr, chance = (newest.get(f"{kind}/{name}") for kind in ("task", "task_stderr", "task_chance"))
        more = ([] if stderr is None else [f"+- {stderr:.3f}"]) + ([] if chance is None else [f"chance {chance:.3f}"])
        tiles.append((f"task {name}", "not finite" if score is None else f"{score:.3f}", "; ".join(more)))
    tiles.append(("tokens", f"{last['tokens']:,}", ""))
    rates = sorted(record["tokens_per_second"] for record in run.steps)
    tiles.append(("tokens per second", f"{rates[len(rates) // 2]:,.0f}", "median"))
    share, whole_s = run.goodput
    tiles.append(("goodput", f"{share:.1%}", f"of {duration(whole_s)} since the first launch"))
    cells = (f"<div><span>{escape(a)}</span><b>{escape(b)}</b><small>{escape(c)}</small></div>" for a, b, c in tiles)
    return f"<section class=tiles>{''.join(cells)}</section>"


def _keys(run: Run) -> list[str]:
    return list(dict.fromkeys(key for record in run.records for key in record))


def seconds_of(run: Run) -> dict[str, float]:
    """Return the seconds that each kind of work took."""

    def total(key: str, records: Records = run.records) -> float:
        return sum(record.get(key) or 0.0 for record in records)

    data, optimizer = total("data_s"), total("optimizer_s")
    return {
        "forward and backward": total("seconds", run.steps) - data - optimizer,
        **{"optimizer": optimizer, "waiting for data": data, "validation": total("eval_s")},
        **{"tasks": total("task_s"), "samples": total("seconds", run.samples), "saving": total("save_s")},
    }


def _times(runs: Sequence[Run]) -> str:
    spent = [seconds_of(run) for run in runs]
    lines = []
    for kind in spent[0]:
        cells = []
        for seconds in spent:
            share = seconds[kind] / (sum(seconds.values()) or 1)
            shown = f"{seconds[kind]:.1f}s" if seconds[kind] < 9.95 else duration(seconds[kind])
            cells.append(f"<progress value={share:.3f}></progress> {shown} <small>{share:.1%}</small>")
        if any(seconds[kind] for seconds in spent):
            lines.append(_row(kind, *cells))
    head = ["", *(_named(runs, run) for run in runs)] if len(runs) > 1 else []
    return f"<section><h2>Where the time went</h2>{_table(head, lines)}</section>"


def _sections(runs: Sequence[Run], title: str, content: Callable[[Run], str]) -> str:
    """Return a section for each run that has this content."""
    names = {run: f" of {_named(runs, run)}" if len(runs) > 1 else "" for run in runs}
    parts = [(run, content(run)) for run in runs]
    return "".join(f"<section><h2>{title}{names[run]}</h2>{part}</section>" for run, part in parts if part)


def _changes(run: Run) -> str:
    lines = [_row(f"{step:,}", escape(key), _code(before), _code(now)) for step, key, before, now in run.changes]
    return _table(["after step", "key", "before", "from then on"], lines) if lines else ""


def _samples(run: Run) -> str:
    """Return the texts by prompt. With a target, they answer the prompt; otherwise they continue it."""
    by_prompt: dict[str, Records] = {}
    for sample in run.samples:
        by_prompt.setdefault(sample["prompt"], []).append(sample)
    blocks = ""
    for prompt, records in by_prompt.items():
        n = min(len(records), SAMPLES)  # evenly spaced, including the first and the last
        shown = [records[round(i * (len(records) - 1) / max(n - 1, 1))] for i in range(n)]
        fewer = f" ({n} of {len(records)})" if n < len(records) else ""
        target = records[-1].get("reference")
        begin = f"<mark>{escape(prompt)}</mark>" if target is None else ""
        lines = [_row(f"{s['step']:,}", f"<pre>{begin}{escape(s['text'])}</pre>") for s in reversed(shown)]
        answer = "" if target is None else f"<p>target: {_code(target)}</p>"
        blocks += f"<h3>{_code(prompt)}{fewer}</h3>{answer}{_table([], lines)}"
    return blocks


def _config(run: Run) -> str:
    """Return the values set by the user, and on a click the whole file with its origins."""
    set_by_user = re.sub(r"(?m)^.*# default\n", "", run.config_text)
    set_by_user = re.sub(r"(?m)^\[.*\]\n\s*(?=\[|\Z)", "", set_by_user)
    whole = f"<details><summary>with defaults</summary><pre>{escape(run.config_text)}</pre></details>"
    return f"<pre>{escape(set_by_user)}</pre>{whole}"


def _named(runs: Sequence[Run], run: Run) -> str:
    """Return the name of one of several runs, with its colour."""
    colour = COLOURS[runs.index(run) % len(COLOURS)]
    return f'<i class=swatch style="background: {colour}"></i>{escape(run.name)}'


def _table(head: Iterable[str], lines: Iterable[str]) -> str:
    """Return a table. Cells and lines are HTML."""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    return f"<div class=scroll><table><tr>{heads}</tr>{''.join(lines)}</table></div>"


def _row(name: str, *cells: str) -> str:
    return f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
