"""Records of a run as reports show them: numbers that are finite, and the content of run.json. No torch."""

import json
import math
import os
from pathlib import Path
from typing import Any

from torchtitan_lite.monitoring.records import parse

Records = list[dict[str, Any]]

BY_SOURCE = "val_loss/", "val_bits_per_byte/"  # followed by the name of a source
TASK = "task/", "task_stderr/", "task_chance/"  # followed by the name of a task
# Keys with numbers. A record with anything else there was not written by a run.
NUMBERS = {
    *("loss", "mean_loss", "grad_norm", "lr", "tokens", "time", "tokens_per_second", "peak_memory_gib", "loss_scale"),
    *("seconds", "data_s", "optimizer_s", "eval_s", "save_s", "task_s"),
    *("val_loss", "val_loss_stderr", "val_bits_per_byte", "val_bits_per_byte_stderr", "unigram_bits_per_byte"),
    *("ema_val_loss", "ema_val_loss_stderr", "ema_val_bits_per_byte", "ema_val_bits_per_byte_stderr"),
}
LARGEST = 1e100  # above the values that a run computes; sums of these are still finite
LONGEST_LINE = 1 << 24  # bytes


def read_records(file: Path, last_bytes: int = 0) -> tuple[Records, int]:
    """The records of a file, and the number of damaged lines, which are skipped: a kill can leave half a line.

    Each record has a step. Its NUMBERS are finite or None. A missing file has no records.

    Args:
        last_bytes: read only the end of the file, whose first line may be cut.

    Raises:
        OSError: the file can't be read.
    """
    records: Records = []
    n_damaged = 0
    if not file.is_file():
        return records, n_damaged
    with file.open("rb") as stream:
        if last_bytes:
            stream.seek(max(stream.seek(0, os.SEEK_END) - last_bytes, 0))
        while line := stream.readline(LONGEST_LINE):
            record = _parse(line)
            if record is None:
                n_damaged += 1
            else:
                records.append(record)
    return records, n_damaged


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is damaged."""
    record = parse(line)
    if record is None:
        return None
    for key, value in record.items():
        if value is None or not (key in NUMBERS or key.startswith((*BY_SOURCE, *TASK))):
            continue
        if type(value) not in (int, float):
            return None
        if not abs(value) <= LARGEST:  # also NaN
            if isinstance(value, int) or math.isfinite(value):
                return None
            record[key] = None
    return record


def read_about(folder: Path) -> dict[str, Any]:
    """The content of run.json.

    Raises:
        OSError: it can't be read.
        ValueError: it is damaged.
    """
    try:
        about = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(about, dict):
        raise ValueError("it holds no table of keys and values")
    return about
