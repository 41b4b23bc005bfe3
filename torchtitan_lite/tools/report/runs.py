"""Reads run folders for the report, and makes the table of several runs for the terminal and the page."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.config.toml import format_value
from torchtitan_lite.errors import DataError
from torchtitan_lite.run import attempts
from torchtitan_lite.scoring.statistics import plus_minus
from torchtitan_lite.terminal import columns, duration
from torchtitan_lite.tools.status import Status, status_of

Records = list[dict[str, Any]]

_ON_TERMINAL = "run", "step", "best val_loss", "at", "bits/byte", "status"  # of `results`
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
        """Marks by step: killed and failed attempts, changes by resumes, phases, the first non-finite loss, spikes."""
        marks = [
            (now.step, before.ended or "killed")
            for before, now in itertools.pairwise(self.attempts)
            if before.ended in ("", "failed")
        ]
        marks += [(self.steps[-1]["step"], "killed")] * self.status.text.startswith("stopped")
        marks += [(step, key.split(".")[-1]) for step, key, *_ in self.changes if not key.startswith(_NOT_LEARNED)]
        marks += [(record["step"], f"phase {record['phase']}") for record in self.having("phase")]
        marks += [(record["step"], "not finite") for record in self.steps if record["loss"] is None][:1]
        marks += [(r["step"], "spike" + " skipped" * (r["spike"]["action"] == "skip")) for r in self.having("spike")]
        found: dict[int, dict[str, None]] = {step: {} for step, _ in sorted(marks)}
        for step, text in marks:
            found[step][text] = None
        return {step: ", ".join(texts) for step, texts in found.items()}


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        DataError: the run has made no step.
        OSError: the folder can't be read.
        ConfigError: this is not the folder of a run, or an older version made it.
    """
    about, history = attempts.of_run(folder)
    records = [
        record | {f"rank_seconds/{rank}": seconds for rank, seconds in enumerate(record.get("rank_seconds", ()))}
        for record in attempts.records(folder)
    ]
    if not any("loss" in record for record in records):
        raise DataError(f"{folder} is not the folder of a run that has made a step")
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


def results(run: Run) -> dict[str, str]:
    """Return what a run has reached so far, by column of the table of runs; of one run, by tile of its page."""
    last, best = run.steps[-1], run.best or {}
    share, whole_s = run.goodput
    tasks = {key: record for record in run.records for key in record if key.startswith("task/")}  # the newest of each
    return {
        "run": run.name,
        "step": f"{last['step']}/{run.config['train.steps']}",
        "train loss": _number(last, "mean_loss", 4),
        "best val_loss": _number(best, "val_loss", 4, "val_loss_stderr"),
        "at": str(best.get("step", "-")),
        "bits/byte": _number(best, "val_bits_per_byte", 3),
        "tokens": f"{last['tokens']:,}",
        "tokens/s": f"{statistics.median_high(record['tokens_per_second'] for record in run.steps):,.0f}",
        "goodput": f"{share:.1%} of {duration(whole_s)}",
        **{key: _number(record, key, 3, key.replace("task/", "task_stderr/")) for key, record in tasks.items()},
        "status": run.status.text,
    }


def _number(record: Mapping[str, Any], key: str, digits: int, stderr: str = "") -> str:
    return plus_minus(record[key], record.get(stderr), digits) if key in record else "-"


def best_first(runs: Sequence[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (run.best["val_loss"] if run.best else math.inf, run.name))


def differing(runs: Sequence[Run]) -> dict[str, dict[Run, str]]:
    """Return the config keys that differ between the runs, with each run's value."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _OF_THE_RUN)
    values = {key: {run: format_value(run.config[key]) if key in run.config else "-" for run in runs} for key in keys}
    return {key: texts for key, texts in values.items() if len(set(texts.values())) > 1}


def table(runs: Sequence[Run]) -> str:
    """Return the table of the runs as text: results, then the keys that differ."""
    keys = differing(runs)
    lines = [[*_ON_TERMINAL, *keys]]
    for run in best_first(runs):
        cells, values = results(run), [texts[run] for texts in keys.values()]
        cut = [value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..." for value in values]
        line = [*(cells[column] for column in _ON_TERMINAL), *cut]
        lines.append(["".join(c if c.isprintable() else "?" for c in cell) for cell in line])
    return "\n".join(columns(lines, right=(_ON_TERMINAL.index("at"), _ON_TERMINAL.index("bits/byte"))))
