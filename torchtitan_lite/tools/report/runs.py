"""A run folder as the report shows it: config, status, metrics, samples and scores."""

import contextlib
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from torchtitan_lite.config import toml
from torchtitan_lite.errors import DataError
from torchtitan_lite.monitoring import attempts
from torchtitan_lite.monitoring.goodput import goodput
from torchtitan_lite.tools.status import Status, status_of

Records = list[dict[str, Any]]

UNKNOWN = Status("unknown", active=False)
BY_SOURCE = "val_loss/", "val_bits_per_byte/"  # followed by the name of a source
TASK = "task/", "task_stderr/", "task_chance/"  # followed by the name of a task

# an assignment on one line, and the comment after it: the first # outside a string
_COMMENTED = re.compile(r"""(([\w-]+)\s*=(?:[^#"']|"(?:\\.|[^"\\])*"|'[^']*')*)#(.*)""")
_OF_THE_RUN = "run.name", "run.out_dir"  # they differ between any two runs
_OF_THE_START = "model.size", "model.init_from", "checkpoint.resume"  # names of other keys, or for one start only


@dataclass(eq=False)
class Run:
    """The content of a run folder. Missing parts are empty."""

    name: str
    folder: Path
    status: Status = UNKNOWN
    reason: str = ""  # why it stopped or failed
    n_steps: str = ""  # of the whole run
    config: dict[str, tuple[str, str]] = field(default_factory=dict)  # "section.key": value as TOML, origin
    records: Records = field(default_factory=list)  # of metrics.jsonl
    steps: Records = field(default_factory=list)
    validations: Records = field(default_factory=list)
    samples: Records = field(default_factory=list)
    changes: list[tuple[int, str, str, str]] = field(default_factory=list)  # by resumes: step, key, old and new value
    goodput: tuple[float, float] = (0.0, 0.0)  # and the seconds that it is of
    notes: list[str] = field(default_factory=list)  # files that could not be read

    def having(self, key: str) -> Records:
        return [record for record in self.records if key in record]

    @property
    def losses(self) -> list[float]:
        return [r["mean_loss"] for r in self.steps if r["mean_loss"] is not None]

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
    run.records = attempts.records(folder)
    run.steps, run.validations = run.having("loss"), run.having("val_loss")
    if not run.steps:
        raise DataError(f"{folder / 'metrics.jsonl'} has no record of a step yet")
    run.samples = attempts.records(folder, "samples.jsonl")
    made = attempts.that_count(attempts.read(folder))
    for before, now in itertools.pairwise(made):
        pairs = {key: (before.config.get(key, value), value) for key, value in now.config.items()}
        pairs |= {f"eval.tasks {t}": (before.tasks.get(t, new)[:12], new[:12]) for t, new in now.tasks.items()}
        run.changes += [
            (now.step, key, toml.format_value(earlier), toml.format_value(value))
            for key, (earlier, value) in pairs.items()
            if earlier != value and key not in _OF_THE_START
        ]
    run.config = _read_config(folder / "config.toml", run.notes)
    run.n_steps = str(made[-1].config["train.steps"]) if made else run.config.get("train.steps", ("", ""))[0]
    if about := attempts.newest_status(folder):
        run.status, run.reason = status_of(folder, about), about["reason"].split("\n")[0]
    run.goodput = goodput(folder)
    return run


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
