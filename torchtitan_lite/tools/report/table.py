"""A table of several runs for the terminal, the lowest validation loss first: `report RUN RUN ... --table`."""

import math

from torchtitan_lite.config import toml
from torchtitan_lite.tools.report.runs import Records, Run

# differ between any two runs
_OF_THE_RUN = "run.name", "run.out_dir"
_LONGEST = 40  # characters of a value


def best_validation(run: Run) -> dict[str, float] | None:
    """The record of the lowest validation loss; None if there is none."""
    known: Records = [record for record in run.validations if record["val_loss"] is not None]
    return min(known, key=lambda record: record["val_loss"], default=None)


def differing_keys(runs: list[Run]) -> list[str]:
    """The config keys whose values differ between runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _OF_THE_RUN)
    return [key for key in keys if len({run.config.get(key, ("-", ""))[0] for run in runs}) > 1]


def table(runs: list[Run]) -> str:
    """One row per run: its last step, its lowest validation loss, its status, and the keys that differ."""
    keys = differing_keys(runs)
    rows = [["run", "step", "best val_loss", "at", "bits/byte", "status", *keys]]
    for run in sorted(runs, key=_rank):
        best = best_validation(run)
        of = run.about.get("steps") or run.config.get("train.steps", ("?", ""))[0]  # older runs have the key only
        cells = [run.name, f"{run.steps[-1]['step']}/{of}"]
        if best is None:
            cells += ["-", "-", "-"]
        else:
            cells += [_with_error(best), f"{best['step']}", _number(best.get("val_bits_per_byte"), ".3f")]
        cells.append(run.status.text)
        cells += [_short(run.config.get(key, ("-", ""))[0]) for key in keys]
        rows.append(["".join(c if c.isprintable() else "?" for c in cell) for cell in cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    numbers = (3, 4)
    return "\n".join(
        "  ".join(c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        .rstrip()
        for row in rows
    )  # fmt: skip


def _rank(run: Run) -> tuple[float, str]:
    best = best_validation(run)
    return (best["val_loss"] if best else math.inf), run.name


def _with_error(record: dict[str, float]) -> str:
    error = _number(record.get("val_loss_stderr"), ".4f")
    return f"{record['val_loss']:.4f}" + (f" +- {error}" if error != "-" else "")


def _number(value: object, spec: str) -> str:
    return format(value, spec) if isinstance(value, int | float) and math.isfinite(value) else "-"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def changes_of(run: Run) -> list[tuple[int, str, str, str]]:
    """What resumes have changed: step, key, value before, value now, as TOML."""
    return [
        (step, key, toml.format_value(before), toml.format_value(now))
        for step, changed in run.changes
        for key, (before, now) in changed.items()
    ]
