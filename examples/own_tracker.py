"""A tracker of your own: `train.py --log.trackers=examples.own_tracker:TABLE` (docs/extending.md).

Writes metrics.csv into the run's folder: a row for each number of a record.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.schema import LogConfig
from torchtitan_lite.config.sections import log
from torchtitan_lite.run.trackers import Tracker, scalars


def table(config: LogConfig, folder: Path, state: TrainState) -> Tracker:
    """Open the file. On a resume, drop the rows of later steps, which will be repeated."""
    file = folder / "metrics.csv"
    rows = file.read_text().splitlines(keepends=True)[1:] if file.is_file() else []
    kept = [row for row in rows if int(row.split(",")[0]) <= state.step]
    stream = file.open("w", buffering=1)
    stream.writelines(["step,name,value\n", *kept])

    def write(values: Mapping[str, Any]) -> None:
        stream.writelines(f"{values['step']},{name},{value}\n" for name, value in scalars(values).items())

    return Tracker(write, stream.close)


TABLE = log.Tracker(f"{__name__}:table")
