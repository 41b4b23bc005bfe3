"""Writes the page of the report: results, curves (figure.py), changes, samples and configs of the runs.

All text of a run is escaped.
"""

import base64
import gzip
import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from plotly.offline import get_plotlyjs

from torchtitan_lite.tools.report.figure import COLOURS, figure
from torchtitan_lite.tools.report.runs import Records, Run, best_first, differing, results

SAMPLES = 12  # per prompt
# the report.css class of a status, by its first word
_STATUS = {
    **{"starting": "live", "running": "live", "complete": "good", "preempted": "warn"},
    **{"failed": "bad", "stopped": "bad"},
}
# forbid all requests, even if text of a run got into the markup
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
_OPTIONS = {"responsive": True, "displaylogo": False, "modeBarButtons": [["toImage", "zoom2d", "pan2d"]]}
# plotly is nearly all of the page, so it is compressed, to a third
_CURVES = """<div class=scroll><div id=curves></div></div><script>
const packed = Uint8Array.from(atob("%s"), (letter) => letter.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
new Response(unpacked).text().then((source) => {
  document.head.append(Object.assign(document.createElement("script"), {textContent: source}));
  const {data, layout} = %s;
  Plotly.newPlot("curves", data, layout, %s);
});
</script>"""


def page(runs: Sequence[Run]) -> str:
    """Return the page as HTML."""
    names = escape(", ".join(run.name for run in runs))
    style = resources.files("torchtitan_lite.tools.report").joinpath("report.css").read_text(encoding="utf-8")
    plotly = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    of = {run: f" of {_named(runs, run)}" if len(runs) > 1 else "" for run in runs}
    sections = [(f"{title}{of[run]}", content(run)) for title, content in _SECTIONS.items() for run in runs]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{names}</title><style>{style}</style></head><body><main>{_head(runs)}"
        f"{_CURVES % (plotly, figure(runs).to_json(), json.dumps(_OPTIONS))}"
        + "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content)
        + "</main></body></html>\n"
    )


def _head(runs: Sequence[Run]) -> str:
    """Return one run's status and tiles, or the table of several runs: status, keys that differ, and results."""
    found = {run: results(run) for run in best_first(runs)}
    columns = dict.fromkeys(column for cells in found.values() for column in cells if column not in ("run", "status"))
    if len(runs) == 1:
        ((run, cells),) = found.items()
        tiles = "".join(f"<div><span>{escape(name)}</span><b>{escape(cells[name])}</b></div>" for name in columns)
        where = escape(str(run.folder))
        return (
            f"<h1>{escape(run.name)} {_status(run)}</h1><p class=note>{where}</p><section class=tiles>{tiles}</section>"
        )
    keys = differing(runs)
    rows = [
        [
            *(_named(runs, run), _status(run), *(_code(texts[run]) for texts in keys.values())),
            *(escape(cells.get(column, "-")) for column in columns),
        ]
        for run, cells in found.items()
    ]
    title = f"<h1>{len(runs)} runs</h1><p class=note>the lowest validation loss first</p>"
    return f"{title}{_table(map(escape, ['run', 'status', *keys, *columns]), rows)}"


def _status(run: Run) -> str:
    word, _, more = run.status.text.partition(", ")
    more = more or run.reason
    shown = f'<b class="status {_STATUS.get(word.split(" ")[0], "")}">{escape(word)}</b>'
    return shown + (f"<small>{escape(more)}</small>" if more else "")


def _changes(run: Run) -> str:
    rows = [[f"{step:,}", escape(key), _code(before), _code(now)] for step, key, before, now in run.changes]
    return _table(["after step", "key", "before", "from then on"], rows) if rows else ""


def _samples(run: Run) -> str:
    """Return the texts by prompt. With a target, they answer the prompt; otherwise they continue it."""
    by_prompt: dict[str, Records] = {}
    for sample in run.samples:
        by_prompt.setdefault(sample["prompt"], []).append(sample)
    blocks = ""
    for prompt, records in by_prompt.items():
        shown = records[:: -len(records) // SAMPLES]  # evenly spaced, from the last one
        fewer = f" ({len(shown)} of {len(records)})" if len(shown) < len(records) else ""
        target = records[-1].get("reference")
        begin = f"<mark>{escape(prompt)}</mark>" if target is None else ""
        rows = [[f"{s['step']:,}", f"<pre>{begin}{escape(s['text'])}</pre>"] for s in shown]
        answer = "" if target is None else f"<p>target: {_code(target)}</p>"
        blocks += f"<h3>{_code(prompt)}{fewer}</h3>{answer}{_table([], rows)}"
    return blocks


def _config(run: Run) -> str:
    """Return the values set by the user, and on a click the whole file with its origins."""
    set_by_user = re.sub(r"(?m)^.*# default\n", "", run.config_text)
    set_by_user = re.sub(r"(?m)^\[.*\]\n\s*(?=\[|\Z)", "", set_by_user)
    whole = f"<details><summary>with defaults</summary><pre>{escape(run.config_text)}</pre></details>"
    return f"<pre>{escape(set_by_user)}</pre>{whole}"


# of each run, if it has this content
_SECTIONS = {"Changed on a resume": _changes, "Samples, the latest first": _samples, "Config": _config}


def _named(runs: Sequence[Run], run: Run) -> str:
    """Return the name of one of several runs, with its colour."""
    colour = COLOURS[runs.index(run) % len(COLOURS)]
    return f'<i class=swatch style="background: {colour}"></i>{escape(run.name)}'


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells are HTML; the first of a row names it."""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    lines = (f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, *cells in rows)
    return f"<div class=scroll><table><tr>{heads}</tr>{''.join(lines)}</table></div>"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"
