"""The history of a run: attempts.jsonl, the newest status in run.json, the records that count, and goodput.

An attempt adds a line when it has taken over the run's folder, before its first step, and a second line when it ends. A
killed attempt has no second line. A run only moves forward: an attempt that begins after step s repeats the steps after
s, so earlier records of these steps no longer count. Nothing is removed from any file.
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
FORMAT_VERSION = 2  # of a run's folder, in run.json


@dataclass(frozen=True)
class Attempt:
    """One start of a run, and how it ended."""

    attempt: int  # from 1
    time: float  # of its launch, in seconds since the epoch
    command: Sequence[str]
    step: int  # it begins after this step
    samples: int  # TrainState.samples_consumed at this step
    config: Mapping[str, Any]  # by "section.key", as JSON types
    setting: Mapping[str, Any]  # the bitwise setting, see checkpointing/compatibility.py
    tasks: Mapping[str, str]  # by task: a hash of its questions
    world_size: int
    hosts: Sequence[str]
    versions: Mapping[str, str]  # of torchtitan_lite, torch and python
    git: Mapping[str, Any]  # commit and dirty; empty outside a repository
    device: str
    must_match: Mapping[str, Any] = field(default_factory=dict)  # see checkpointing/compatibility.py
    segments: Sequence[Mapping[str, Any]] = ()  # TrainState.segments and phases; empty in attempts of version 1.0
    phases: Sequence[int] = ()
    claim: str = ""  # with `run.remote`, see checkpointing/remote.py
    forked_from: str = ""  # the other run's checkpoint that it began with; empty: none
    ended: str = ""  # "complete", "preempted" or "failed"; empty while it runs, and after a kill
    last_step: int = 0  # its last step, if it has ended
    reason: str = ""
    end_time: float = 0.0


_FIELDS = {each.name for each in dataclasses.fields(Attempt)}


def read(folder: Path) -> list[Attempt]:
    """Read the attempts of a run, oldest first. Ignores a line cut off by a kill.

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
        OSError: the line is not or only partly written.
    """
    append_line(folder / FILE, json.dumps(line), durably=True)
    sync_folder(folder)


def of_step(attempts: Sequence[Attempt], step: int) -> Attempt | None:
    """Return the attempt whose version of a step counts; None if a different run made the step."""
    return next((attempt for attempt in reversed(attempts) if attempt.step < step), None)


def claim_of(folder: Path, step: int) -> str | None:
    """Return the claim of the attempt whose version of a step counts; None if a different run made the step."""
    made = of_step(read(folder), step)
    return made.claim if made else None


def records(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the records that count in a file of the run's folder. Each has "step" and its "attempt" number.

    A record counts unless a later attempt began before its step, or with a different run's checkpoint. Lines cut off by
    a kill are ignored.

    Raises:
        OSError: a file can't be read.
    """
    ends: dict[int, int] = {}  # by attempt: the last step whose records count
    last = 2**63
    for attempt in reversed(read(folder)):
        ends[attempt.attempt] = last
        last = -1 if attempt.forked_from else min(last, attempt.step)
    return [line for line in _lines(folder / name) if line.get("step", 0) <= ends.get(line.get("attempt", 0), last)]


def last_record(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what run.json and `status` show of the last logged step; None if there is none.

    Its keys: step; time, in seconds since the epoch; loss, the mean per token that the terminal shows (None: not
    finite); tokens_per_second, the median of the last ten records.
    """
    newest = [record for record in records if "loss" in record][-10:]
    if not newest:
        return None
    return {
        "step": newest[-1]["step"],
        "time": newest[-1]["time"],
        "loss": newest[-1]["mean_loss"] if newest[-1]["loss"] is not None else None,
        "tokens_per_second": sorted(record["tokens_per_second"] for record in newest)[len(newest) // 2],
    }


def best_step(folder: Path, steps: Iterable[int]) -> int | None:
    """Return which of these steps has the lowest validation loss; None if none was validated."""
    losses = {r["step"]: r["val_loss"] for r in records(folder) if r.get("val_loss") is not None}
    return min((step for step in steps if step in losses), key=lambda step: (losses[step], step), default=None)


def newest_status(folder: Path) -> dict[str, Any]:
    """Return the content of run.json; empty if it is missing or damaged.

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


def of_run(folder: Path) -> tuple[dict[str, Any], list[Attempt]]:
    """Return the content of run.json, and the attempts.

    Raises:
        ConfigError: this is not the folder of a run, or an older version made it.
    """
    about, attempts = newest_status(folder), read(folder)
    if about and attempts:
        return about, attempts
    others = sorted(file.parent.name for file in folder.glob("*/run.json"))
    more = f" and {len(others) - 10} more" * (len(others) > 10)
    names = f"; it has the runs {', '.join(others[:10])}{more}" if others else ""
    lost = FILE if about else "run.json"
    raise ConfigError(f"{folder} is not the folder of a run: it has no {lost} that can be read{names}")


def since_fork(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """Return the attempts from the last one that began with a different run's checkpoint.

    Until a fork has its own checkpoint, each attempt begins with the other run's, perhaps a newer one.
    """
    return attempts[max((i for i, attempt in enumerate(attempts) if attempt.forked_from), default=0) :]


def that_count(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts with steps that count: those that no later attempt repeated."""
    started = [a for a in since_fork(attempts) if not a.ended or a.last_step > a.step]
    return [a for i, a in enumerate(started) if all(a.step < later.step for later in started[i + 1 :])]


# --- goodput ----------------------------------------------------------------------------------------------------


def goodput(made: Sequence[Attempt], records: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the goodput of a run, 0 to 1, and the seconds from its first launch to its last record or end.

    Goodput is the share of this time that went into steps that count. The rest is starting, loading, saving,
    validation, samples, repeated steps, and the time between attempts. A record has the seconds of training since the
    attempt's previous record, so the work of a killed attempt after its last record does not count.

    Args:
        made: all attempts.
        records: the records of metrics.jsonl that count.
    """
    if not made:
        return 0.0, 0.0
    trained_s = sum(record["seconds"] for record in records if "loss" in record)
    # without later starts of a finished run
    last = max([*(one.end_time for one in that_count(made)), *(record["time"] for record in records)], default=0.0)
    whole_s = max(last - made[0].time, trained_s)  # a clock may have been set back
    return (trained_s / whole_s if trained_s else 0.0), whole_s


def goodput_line(folder: Path) -> str:
    """Return e.g. "goodput 81 % of 2h10m since the first launch"."""
    share, seconds = goodput(read(folder), records(folder))
    return f"goodput {share:.0%} of {duration(seconds)} since the first launch"


# --- files ------------------------------------------------------------------------------------------------------


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, if it exists."""
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            yield json.loads(line, parse_constant=lambda _: None)  # NaN
        except ValueError:  # cut off by a kill
            continue
