"""The table of runs, the lowest validation loss first: for the terminal (`report RUN RUN ... --table`) and the page."""

import math

from torchtitan_lite.tools.columns import columns
from torchtitan_lite.tools.report.runs import Run, differing_keys

RESULTS = "run", "step", "best val_loss", "at", "bits/byte", "status"
_LONGEST = 40  # characters of a value on the terminal


def rows(runs: list[Run]) -> list[tuple[Run, dict[str, str]]]:
    """Each run with its cells by column, the best run first: the results, then the config keys that differ."""
    keys = differing_keys(runs)
    found = []
    for run in sorted(runs, key=lambda run: (run.best["val_loss"] if run.best else math.inf, run.name)):
        best = run.best or {}
        loss, error = _number(best.get("val_loss"), ".4f"), _number(best.get("val_loss_stderr"), ".4f")
        cells = {
            "run": run.name,
            "step": f"{run.steps[-1]['step']}/{run.n_steps or '?'}",
            "best val_loss": f"{loss} +- {error}" if error != "-" else loss,
            "at": str(best.get("step", "-")),
            "bits/byte": _number(best.get("val_bits_per_byte"), ".3f"),
            "status": run.status.text,
        }
        found.append((run, cells | {key: run.value(key) for key in keys}))
    return found


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def table(runs: list[Run]) -> str:
    keys = differing_keys(runs)
    lines = [[*RESULTS, *keys]]
    for _, row in rows(runs):
        shown = row | {key: _shortened(row[key]) for key in keys}
        lines.append(["".join(c if c.isprintable() else "?" for c in cell) for cell in shown.values()])
    return "\n".join(columns(lines, right=(RESULTS.index("at"), RESULTS.index("bits/byte"))))


def _shortened(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."
