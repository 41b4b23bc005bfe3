"""The history of a run: attempts.jsonl, the newest status in run.json, which records of its other files count,
and goodput.

An attempt adds a line when it has taken over the run's folder, before its first step, and another when it ends. One
that was killed has no second line. A run only moves forward: an attempt that begins after step s makes the steps after
s again, so what earlier attempts have recorded of them no longer counts. Nothing is removed from any file.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.files import append_line, sync_folder
from torchtitan_lite.terminal import duration

FILE = "attempts.jsonl"
FORMAT_VERSION = 1  # of a run's folder, in run.json


@dataclass(frozen=True)
class Attempt:
    """One start of a run, and how it ended."""

    attempt: int  # from 1
    time: float  # of its launch, in seconds since the epoch
    command: Sequence[str]
    step: int  # it begins after this step
    samples: int  # TrainState.samples_consumed there
    config: Mapping[str, Any]  # by "section.key", as JSON has it
    setting: Mapping[str, Any]  # the bitwise setting, see checkpointing/compatibility.py
    tasks: Mapping[str, str]  # a hash of the questions of each task, by its name
    world_size: int
    hosts: Sequence[str]
    versions: Mapping[str, str]  # of torchtitan_lite, torch and python
    git: Mapping[str, Any]  # commit and dirty; empty outside a repository
    device: str
    must_match: Mapping[str, Any] = field(default_factory=dict)  # of model and data, see checkpointing/compatibility.py
    forked_from: str = ""  # the checkpoint of another run that it began with; empty: none
    ended: str = ""  # "complete", "preempted" or "failed"; empty while it runs, and after a kill
    last_step: int = 0  # the last step that it has made, if it has ended
    reason: str = ""
    end_time: float = 0.0


_FIELDS = {each.name for each in dataclasses.fields(Attempt)}


def read(folder: Path) -> list[Attempt]:
    """The attempts of a run, oldest first. A line that a kill has cut is ignored.

    Raises:
        OSError: the file can't be read.
    """
    attempts: dict[int, Attempt] = {}
    for line in _lines(folder / FILE):
        number: int = line["attempt"]
        if "ended" not in line:
            attempts[number] = Attempt(**{key: value for key, value in line.items() if key in _FIELDS})
        elif number in attempts:
            attempts[number] = replace(attempts[number], **{key: line[key] for key in line if key in _FIELDS})
    return list(attempts.values())


def add(folder: Path, line: Mapping[str, Any]) -> None:
    """Append a line: the fields of an Attempt up to `forked_from`, or its number and those of its end.

    Raises:
        OSError: it is not written, or only a part of it.
    """
    append_line(folder / FILE, json.dumps(line), durably=True)
    sync_folder(folder)


def of_step(attempts: Sequence[Attempt], step: int) -> Attempt | None:
    """The attempt that made a step, if the step was made: the last one that began before it. None: another run did."""
    return next((attempt for attempt in reversed(attempts) if attempt.step < step), None)


def records(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The records that count, of a file in the run's folder. Each has a "step" and the number of its "attempt".

    A record counts unless a later attempt began after an earlier step, or with another run's checkpoint. Lines that a
    kill has cut are ignored.

    Raises:
        OSError: a file can't be read.
    """
    ends: dict[int, int] = {}  # by attempt: the last step whose records count
    last = 2**63
    for attempt in reversed(read(folder)):
        ends[attempt.attempt] = last
        last = -1 if attempt.forked_from else min(last, attempt.step)
    return [line for line in _lines(folder / name) if line.get("step", 0) <= ends.get(line.get("attempt", 0), last)]


def best_step(folder: Path, steps: Iterable[int]) -> int | None:
    """Of these steps of a run, the one with the lowest validation loss; None if none was validated."""
    losses = {r["step"]: r["val_loss"] for r in records(folder) if r.get("val_loss") is not None}
    return min((step for step in steps if step in losses), key=lambda step: (losses[step], step), default=None)


def newest_status(folder: Path) -> dict[str, Any]:
    """The content of run.json; empty if it is missing or damaged.

    Raises:
        ConfigError: an older version made the folder.
    """
    try:
        about: dict[str, Any] = json.loads((folder / "run.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if about.get("format_version") != FORMAT_VERSION:
        raise ConfigError(
            f"{folder} was made by an older version: finish it, or export it, with the last commit of 0.4 "
            "(6b3ed8e, see CHANGELOG.md); then start from the export with model.init_from"
        )
    return about


def since_fork(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """The attempts from the last one that began with another run's checkpoint: until a fork has a checkpoint of its
    own, each does, perhaps with a newer one."""
    return attempts[max((i for i, attempt in enumerate(attempts) if attempt.forked_from), default=0) :]


def that_count(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts whose steps count: those that were not made again."""
    started = [a for a in since_fork(attempts) if not a.ended or a.last_step > a.step]
    return [a for i, a in enumerate(started) if all(a.step < later.step for later in started[i + 1 :])]


# --- goodput ----------------------------------------------------------------------------------------------------


def goodput(made: Sequence[Attempt], records: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The goodput of a run, 0 to 1, and the seconds from its first launch to its last record or end.

    It is the share of the time since the first launch that went into steps that count. The rest is starting, loading,
    saving, validation, samples, the steps that a later attempt makes again, and the time between attempts. A record of
    a step has the seconds of training since the record before, in the same attempt, so what a killed attempt did after
    its last record is not counted.

    Args:
        made: all attempts.
        records: those of metrics.jsonl that count.
    """
    if not made:
        return 0.0, 0.0
    trained_s = sum(record["seconds"] for record in records if "loss" in record)
    ends = [attempt.end_time for attempt in that_count(made)]  # not of a finished run that is started again
    last = max([*ends, *(record["time"] for record in records)], default=0.0)
    whole_s = max(last - made[0].time, trained_s)  # a clock may have been set back
    return (trained_s / whole_s if trained_s else 0.0), whole_s


def goodput_line(folder: Path) -> str:
    """goodput 81 % of 2h10m since the first launch"""
    share, seconds = goodput(read(folder), records(folder))
    return f"goodput {share:.0%} of {duration(seconds)} since the first launch"


# --- files ------------------------------------------------------------------------------------------------------


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, if it exists."""
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            content = json.loads(line, parse_constant=lambda _: None)  # NaN
        except ValueError:
            continue
        if isinstance(content, dict):
            yield content
