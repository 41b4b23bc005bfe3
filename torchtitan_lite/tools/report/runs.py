"""Reads run folders for the report, and makes the table of several runs for the terminal and the page."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.config.toml import format_value
from torchtitan_lite.errors import DataError
from torchtitan_lite.run import attempts
from torchtitan_lite.tools.columns import columns
from torchtitan_lite.tools.status import Status, runs_in, status_of

Records = list[dict[str, Any]]

RESULTS = "run", "step", "best val_loss", "at", "bits/byte", "status"
_OF_THE_RUN = "run.name", "run.out_dir"  # differ between any two runs
_OF_THE_START = "model.size", "model.init_from", "checkpoint.resume"  # aliases of other keys, or for one start only
_NOT_LEARNED = "log.", "profile.", "checkpoint.", "sample.", "run.", "data.cache_dir"  # changes are not marked
_LONGEST = 40  # characters of a value on the terminal


@dataclass(frozen=True, eq=False)
class Run:
    """The content of a run folder."""

    folder: Path
    status: Status
    reason: str  # why it stopped or failed
    attempts: Sequence[attempts.Attempt]  # from the last fork on
    records: Records  # of metrics.jsonl, those that count
    samples: Records
    config_text: str  # config.toml: each value with its origin
    goodput: tuple[float, float]  # share, and the seconds since the first launch

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def config(self) -> Mapping[str, Any]:
        """The values of the newest attempt that made a step, by "section.key"."""
        return attempts.that_count(self.attempts)[-1].config

    def having(self, key: str) -> Records:
        return [record for record in self.records if key in record]

    @property
    def steps(self) -> Records:
        return self.having("loss")

    @property
    def best(self) -> dict[str, Any] | None:
        """The record with the lowest validation loss."""
        finite = [r for r in self.having("val_loss") if r["val_loss"] is not None]
        return min(finite, key=lambda r: r["val_loss"], default=None)

    @property
    def changes(self) -> list[tuple[int, str, str, str]]:
        """Changes by resumes: the step before, the key, the old and the new value."""
        found = []
        for before, now in itertools.pairwise(attempts.that_count(self.attempts)):
            pairs = {key: (before.config.get(key, value), value) for key, value in now.config.items()}
            pairs |= {f"eval.tasks {t}": (before.tasks.get(t, new)[:12], new[:12]) for t, new in now.tasks.items()}
            found += [
                (now.step, key, format_value(earlier), format_value(value))
                for key, (earlier, value) in pairs.items()
                if earlier != value and key not in _OF_THE_START
            ]
        return found

    @property
    def events(self) -> dict[int, str]:
        """Marks by step: killed and failed attempts, changes by resumes, the first non-finite loss, and spikes."""
        found: dict[int, list[str]] = {}
        for before, now in itertools.pairwise(self.attempts):
            if before.ended in ("", "failed"):
                found.setdefault(now.step, []).append(before.ended or "killed")
        if self.status.text.startswith("stopped"):
            found.setdefault(self.steps[-1]["step"], []).append("killed")
        for step, key, _, _ in self.changes:
            if not key.startswith(_NOT_LEARNED):
                found.setdefault(step, []).append(key.split(".")[-1])
        for record in [r for r in self.steps if r["loss"] is None][:1]:
            found.setdefault(record["step"], []).append("not finite")
        for record in self.having("spike"):
            skipped = record["spike"]["action"] == "skip"
            found.setdefault(record["step"], []).append("spike skipped" if skipped else "spike")
        return {step: ", ".join(dict.fromkeys(texts)) for step, texts in sorted(found.items())}


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        DataError: the run has made no step, or the folder can't be read.
        ConfigError: an older version made it.
    """
    try:
        about, history = attempts.newest_status(folder), attempts.read(folder)
        records = attempts.records(folder)
        if not (about and history and any("loss" in record for record in records)):
            raise DataError(f"{folder} is not the folder of a run that has made a step{runs_in(folder)}")
        return Run(
            folder=folder,
            status=status_of(folder, about, records),
            reason=about["reason"].split("\n")[0],
            attempts=attempts.since_fork(history),
            records=records,
            samples=attempts.records(folder, "samples.jsonl"),
            config_text=(folder / "config.toml").read_text(encoding="utf-8"),
            goodput=attempts.goodput(history, records),
        )
    except OSError as error:
        raise DataError(f"{folder} can't be read: {error}") from None


def rows(runs: Sequence[Run]) -> list[tuple[Run, dict[str, str]]]:
    """Return each run with its cells by column: results, then differing keys. The lowest validation loss is first."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _OF_THE_RUN)
    values = {key: [format_value(run.config[key]) if key in run.config else "-" for run in runs] for key in keys}
    differing = {key: dict(zip(runs, texts, strict=True)) for key, texts in values.items() if len(set(texts)) > 1}
    found = []
    for run in sorted(runs, key=lambda run: (run.best["val_loss"] if run.best else math.inf, run.name)):
        best = run.best or {}
        loss, error = _number(best.get("val_loss"), ".4f"), _number(best.get("val_loss_stderr"), ".4f")
        cells = {
            "run": run.name,
            "step": f"{run.steps[-1]['step']}/{run.config['train.steps']}",
            "best val_loss": f"{loss} +- {error}" if error != "-" else loss,
            "at": str(best.get("step", "-")),
            "bits/byte": _number(best.get("val_bits_per_byte"), ".3f"),
            "status": run.status.text,
        }
        found.append((run, cells | {key: texts[run] for key, texts in differing.items()}))
    return found


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def table(runs: Sequence[Run]) -> str:
    """Format the rows as text."""
    found = [cells for _, cells in rows(runs)]
    lines = [list(found[0])]
    for cells in found:
        shown = [
            value if column in RESULTS or len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."
            for column, value in cells.items()
        ]
        lines.append(["".join(c if c.isprintable() else "?" for c in cell) for cell in shown])
    return "\n".join(columns(lines, right=(RESULTS.index("at"), RESULTS.index("bits/byte"))))
