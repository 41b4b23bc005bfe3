"""The files of records in a run's folder, such as metrics.jsonl: a JSON object with a step on each line.

`metrics.Log` writes them. A kill or a full disk can leave half a line; readers skip it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is damaged."""
    try:
        record = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    # 2**53: larger numbers are not those of a step, and are not exact in JSON
    is_record = isinstance(record, dict) and type(record.get("step")) is int and 0 <= record["step"] < 2**53
    return record if is_record else None


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, if it exists.

    Raises:
        OSError: it can't be read.
    """
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        if record := parse(line):
            yield record
