"""Reads run folders for a report: config, status, metrics and samples."""

import contextlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from torchtitan_lite.config import toml
from torchtitan_lite.errors import DataError
from torchtitan_lite.tools.status import UNKNOWN, Status, status_of

Records = list[dict[str, Any]]
Changed = dict[str, tuple[Any, Any]]  # by "section.key": the value before and now


@dataclass
class Run:
    """The content of a run folder. Missing parts are empty."""

    name: str
    folder: Path
    about: dict[str, str] = field(default_factory=dict)  # the strings of run.json, and its number of steps
    status: Status = field(default_factory=lambda: UNKNOWN)
    config: dict[str, tuple[str, str]] = field(default_factory=dict)  # "section.key": value as TOML, origin
    steps: Records = field(default_factory=list)
    validations: Records = field(default_factory=list)
    averages: Records = field(default_factory=list)  # validations of the averaged weights (optim.ema_decay)
    saves: Records = field(default_factory=list)
    skipped: Records = field(default_factory=list)
    spikes: Records = field(default_factory=list)  # those that were not rewound
    rewinds: Records = field(default_factory=list)
    samples: Records = field(default_factory=list)
    rouge: Records = field(default_factory=list)  # in the order of steps
    tasks: Records = field(default_factory=list)  # a record for each task and step
    task_times: Records = field(default_factory=list)
    changes: list[tuple[int, Changed]] = field(default_factory=list)  # what resumes have changed, and after which step
    notes: list[str] = field(default_factory=list)  # files and lines that could not be read


ROUGE = ("rouge1", "rouge2", "rougeLsum")
# Keys with numbers. A record with anything else there was not written by a run.
NUMBERS = {
    *("loss", "mean_loss", "grad_norm", "lr", "tokens", "time", "tokens_per_second", "peak_memory_gib", "loss_scale"),
    *("seconds", "data_s", "optimizer_s", "eval_s", "save_s", "task_s"),
    *("val_loss", "val_loss_stderr", "val_bits_per_byte", "val_bits_per_byte_stderr", "unigram_bits_per_byte"),
    *("ema_val_loss", "ema_val_loss_stderr", "ema_val_bits_per_byte", "ema_val_bits_per_byte_stderr"),
    *ROUGE,
}


LARGEST = 1e100  # above the values that a run computes; sums of these are still finite


LONGEST_LINE = 1 << 24  # characters


BY_SOURCE = "val_loss/", "val_bits_per_byte/"  # followed by the name of a source
TASK = "task/", "task_stderr/", "task_chance/"  # followed by the name of a task


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        DataError: it has no metrics.jsonl with a record, or can't be read.
    """
    try:
        return _read_run(folder)
    except OSError as error:
        raise DataError(f"{folder} can't be read: {error}") from None


def _read_run(folder: Path) -> Run:
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"{folder} has no metrics.jsonl: it is not the folder of a run that has made a step")
    run = Run(folder.resolve().name, folder)
    kinds = {"loss": run.steps, "val_loss": run.validations, "save_s": run.saves, "skipped_samples": run.skipped}
    kinds["ema_val_loss"] = run.averages
    kinds["task_s"] = run.task_times
    for record in _read_lines(folder / "metrics.jsonl", run.notes):
        for key, records in kinds.items():
            if key in record:
                records.append(record)
        if "loss" in record:
            record.setdefault("mean_loss", record["loss"])  # of an older run
        if isinstance(record.get("spike"), dict):
            run.spikes.append(record)
        if type(record.get("rewound_from")) is int and type(record.get("rewind")) is int:
            run.rewinds.append(record)
        if any(key.startswith(TASK[0]) for key in record):
            run.tasks.append(record)
    if not run.steps:
        damaged = f" ({'; '.join(run.notes)})" if run.notes else ""
        raise DataError(f"{folder / 'metrics.jsonl'} has no record of a step yet{damaged}")
    run.samples = _read_lines(folder / "samples.jsonl", run.notes, texts=("prompt", "text"))
    scores = _read_lines(folder / "rouge.jsonl", run.notes)
    complete = [r for r in scores if all(r.get(key) is not None for key in ROUGE)]
    run.rouge = sorted(complete, key=lambda r: r["step"])
    for record in _read_lines(folder / "changes.jsonl", run.notes):
        run.changes.append((record["step"], _changed(record.get("changed"))))
    run.about, run.status = _read_status(folder, run.notes)
    run.config = _read_config(folder / "config.toml", run.notes)
    return run


def _read_lines(file: Path, notes: list[str], texts: tuple[str, ...] = ()) -> Records:
    """The records of a file. Damaged lines are skipped: a killed process may leave half a line.

    Args:
        texts: keys that must hold a string.
    """
    if not file.is_file():
        return []
    records, bad = [], 0
    with file.open(encoding="utf-8", errors="replace") as stream:
        while line := stream.readline(LONGEST_LINE):
            record = _record(line)
            if record is None or not all(isinstance(record.get(key), str) for key in texts):
                bad += 1
            else:
                records.append(record)
    if bad:
        notes.append(f"{file.name}: {bad} damaged {'line' if bad == 1 else 'lines'} skipped")
    return records


def _record(line: str) -> dict[str, Any] | None:
    """Parse a record: it has a step, and its NUMBERS are finite or None. Returns None for any other line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or not 0 <= record["step"] < 2**53:
        return None
    for key in [key for key in record if key in NUMBERS or key.startswith((*BY_SOURCE, *TASK))]:
        value = record[key]
        if value is not None and type(value) not in (int, float):
            return None
        if value is not None and not abs(value) <= LARGEST:  # also NaN
            if isinstance(value, int) or math.isfinite(value):
                return None
            record[key] = None
    return record


def _changed(content: Any) -> Changed:
    """The changed values of a record; those that TOML can't write are left out."""
    found: Changed = {}
    for key, pair in content.items() if isinstance(content, dict) else ():
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            before, now = pair
            toml.format_value([before, now])
            found[key] = before, now
    return found


def _read_status(folder: Path, notes: list[str]) -> tuple[dict[str, str], Status]:
    file = folder / "run.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, UNKNOWN
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{file.name}: can't be read: {error}")
        return {}, UNKNOWN
    if not isinstance(content, dict):
        notes.append(f"{file.name}: not a table of keys and values")
        return {}, UNKNOWN
    if type(content.get("steps")) is int:
        content["steps"] = str(content["steps"])
    return {key: value for key, value in content.items() if isinstance(value, str)}, status_of(folder, content)


def _read_config(file: Path, notes: list[str]) -> dict[str, tuple[str, str]]:
    """Values, and their origins from the comments that `toml.to_toml_with_origins` writes."""
    values: dict[str, str] = {}
    try:
        text = file.read_text(encoding="utf-8")
        for section, table in tomli.loads(text).items():
            inside = table if isinstance(table, dict) else {"": table}
            values |= {f"{section}.{key}".rstrip("."): toml.format_value(value) for key, value in inside.items()}
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


# an assignment on one line, and the comment after it: the first # outside a string
_COMMENTED = re.compile(r"""(([\w-]+)\s*=(?:[^#"']|"(?:\\.|[^"\\])*"|'[^']*')*)#(.*)""")
