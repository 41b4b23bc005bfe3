"""A run folder as the report shows it: config, status, metrics, samples and scores."""

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from torchtitan_lite.config import toml
from torchtitan_lite.errors import DataError
from torchtitan_lite.monitoring import goodput
from torchtitan_lite.tools.records import Records, read_about, read_records
from torchtitan_lite.tools.status import UNKNOWN, Status, status_of

# an assignment on one line, and the comment after it: the first # outside a string
_COMMENTED = re.compile(r"""(([\w-]+)\s*=(?:[^#"']|"(?:\\.|[^"\\])*"|'[^']*')*)#(.*)""")
_OF_THE_RUN = "run.name", "run.out_dir"  # they differ between any two runs


@dataclass(eq=False)
class Run:
    """The content of a run folder. Missing parts are empty."""

    name: str
    folder: Path
    about: dict[str, str] = field(default_factory=dict)  # the strings of run.json
    status: Status = UNKNOWN
    n_steps: str = ""  # of the whole run
    config: dict[str, tuple[str, str]] = field(default_factory=dict)  # "section.key": value as TOML, origin
    records: Records = field(default_factory=list)  # of metrics.jsonl, and of rouge.jsonl in the order of steps
    steps: Records = field(default_factory=list)
    validations: Records = field(default_factory=list)
    samples: Records = field(default_factory=list)
    changes: list[tuple[int, str, str, str]] = field(default_factory=list)  # by resumes: step, key, old and new value
    goodput: dict[str, float] = field(default_factory=dict)  # seconds by kind, see monitoring/goodput.py
    notes: list[str] = field(default_factory=list)  # files and lines that could not be read

    def having(self, key: str) -> Records:
        return [record for record in self.records if key in record]

    @property
    def losses(self) -> list[float]:
        return [r["mean_loss"] for r in self.steps if r["mean_loss"] is not None]

    @property
    def spikes(self) -> Records:
        """The loss spikes that were not rewound."""
        return [r for r in self.having("spike") if isinstance(r["spike"], dict)]

    @property
    def rewinds(self) -> Records:
        return [r for r in self.having("rewind") if type(r["rewind"]) is type(r.get("rewound_from")) is int]

    @property
    def best(self) -> dict[str, Any] | None:
        """The record of the lowest validation loss."""
        finite = [r for r in self.validations if r["val_loss"] is not None]
        return min(finite, key=lambda r: r["val_loss"], default=None)

    def value(self, key: str) -> str:
        """A value of the config as TOML, "-" if it is not known."""
        return self.config.get(key, ("-", ""))[0]


def differing_keys(runs: list[Run]) -> list[str]:
    """The config keys whose values differ between runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in _OF_THE_RUN)
    return [key for key in keys if len({run.value(key) for run in runs}) > 1]


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        DataError: it has no metrics.jsonl with the record of a step, or can't be read.
    """
    try:
        return _read_run(folder)
    except OSError as error:
        raise DataError(f"{folder} can't be read: {error}") from None


def _read_run(folder: Path) -> Run:
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"{folder} has no metrics.jsonl: it is not the folder of a run that has made a step")
    run = Run(folder.resolve().name, folder)
    run.records = _records(run, "metrics.jsonl")
    run.steps, run.validations = run.having("loss"), run.having("val_loss")
    for record in run.steps:
        record.setdefault("mean_loss", record["loss"])
    if not run.steps:
        damaged = f" ({'; '.join(run.notes)})" if run.notes else ""
        raise DataError(f"{folder / 'metrics.jsonl'} has no record of a step yet{damaged}")
    run.samples = _records(run, "samples.jsonl", texts=("prompt", "text"))
    run.records += sorted(_records(run, "rouge.jsonl"), key=lambda r: r["step"])
    for record in _records(run, "changes.jsonl"):
        changed = record.get("changed")
        for key, values in changed.items() if isinstance(changed, dict) else ():
            with contextlib.suppress(ValueError, TypeError, RecursionError):  # values that TOML can't write
                before, now = values
                run.changes.append((record["step"], key, toml.format_value(before), toml.format_value(now)))
    run.config = _read_config(folder / "config.toml", run.notes)
    try:
        about = read_about(folder)
    except FileNotFoundError:
        about = {}
    except (OSError, ValueError) as error:
        about = {}
        run.notes.append(f"run.json: can't be read: {error}")
    run.status = status_of(folder, about)
    run.goodput = goodput.newest(about, run.records)
    run.about = {key: value for key, value in about.items() if isinstance(value, str)}
    n_steps = about.get("steps")
    run.n_steps = str(n_steps) if type(n_steps) is int else run.config.get("train.steps", ("", ""))[0]
    return run


def _records(run: Run, name: str, texts: tuple[str, ...] = ()) -> Records:
    """The records of a file of the run. Damaged ones become a note.

    Args:
        texts: keys that must hold a string.
    """
    records, n_damaged = read_records(run.folder / name)
    kept = [record for record in records if all(isinstance(record.get(key), str) for key in texts)]
    if n_damaged := n_damaged + len(records) - len(kept):
        run.notes.append(f"{name}: {n_damaged} damaged {'line' if n_damaged == 1 else 'lines'} skipped")
    return kept


def _read_config(file: Path, notes: list[str]) -> dict[str, tuple[str, str]]:
    """Values, and their origins from the comments that `toml.to_toml_with_origins` writes."""
    values: dict[str, str] = {}
    try:
        text = file.read_text(encoding="utf-8")
        for section, table in tomli.loads(text).items():
            keys = table if isinstance(table, dict) else {"": table}
            values |= {f"{section}.{key}".rstrip("."): toml.format_value(value) for key, value in keys.items()}
    except FileNotFoundError:
        notes.append(f"{file.name}: does not exist, so the config is not shown")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{file.name}: can't be read, so the config is not shown: {error}")
        return {}
    origins, section = {}, ""
    for line in text.split("\n"):
        if header := re.match(r"\[([\w-]+)\]", line):
            section = header[1]
        elif match := _COMMENTED.fullmatch(line):
            key = f"{section}.{match[2]}"
            with contextlib.suppress(ValueError):
                # a line of a multi-line string can look like an assignment: compare with the parsed value
                if toml.format_value(tomli.loads(match[1])[match[2]]) == values.get(key):
                    origins[key] = match[3].strip()
    return {key: (value, origins.get(key, "")) for key, value in values.items()}
