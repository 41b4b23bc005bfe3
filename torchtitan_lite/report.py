"""One page about one or several runs: `python -m torchtitan_lite.report RUN [RUN ...]` writes report.html.

The page needs no network: plotly's JavaScript is inside. Only files of the run folders are read; training knows nothing
of this. report_page.py makes the page.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchtitan_lite import cli, paths
from torchtitan_lite.distributed import env_int
from torchtitan_lite.errors import ConfigError, DataError, run_cli

Records = list[dict[str, Any]]


@dataclass
class Run:
    """What a run folder says. Whatever is missing is empty."""

    name: str
    folder: Path
    status: dict[str, Any] = field(default_factory=dict)  # run.json
    config: dict[str, tuple[str, str]] = field(default_factory=dict)  # "section.key": value as TOML, origin
    steps: Records = field(default_factory=list)
    validations: Records = field(default_factory=list)
    saves: Records = field(default_factory=list)
    skipped: Records = field(default_factory=list)
    samples: Records = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be read


def read_run(folder: Path) -> Run:
    """The files of a run folder.

    Raises:
        DataError: it has no metrics.jsonl with a record.
    """
    if not (folder / "metrics.jsonl").is_file():
        raise DataError(f"{folder} has no metrics.jsonl: it is no folder of a run that has made a step")
    run = Run(folder.resolve().name, folder)
    kinds = {"loss": run.steps, "val_loss": run.validations, "save_s": run.saves, "skipped_samples": run.skipped}
    for record in _read_lines(folder / "metrics.jsonl", run.notes):
        for key, records in kinds.items():
            if key in record:
                records.append(record)
    run.samples = [
        r
        for r in _read_lines(folder / "samples.jsonl", run.notes)
        if isinstance(r.get("prompt"), str) and isinstance(r.get("text"), str)
    ]
    if not run.steps:
        raise DataError(f"{folder / 'metrics.jsonl'} has no record of a step yet")
    run.status = _read_status(folder / "run.json")
    run.config = _read_config(folder / "config.toml", run.notes)
    return run


def _read_lines(file: Path, notes: list[str]) -> Records:
    """The records of a file; a line that is none (a killed process may leave half of one) is passed over."""
    if not file.is_file():
        return []
    records, bad = [], 0
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                record = json.loads(line)
                step = record["step"]
                if not isinstance(step, int):
                    raise TypeError
                records.append(record)
            except (ValueError, TypeError, KeyError):
                bad += 1
    if bad:
        notes.append(f"{file.name}: {bad} damaged {'line' if bad == 1 else 'lines'} passed over")
    return records


def _read_status(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_config(file: Path, notes: list[str]) -> dict[str, tuple[str, str]]:
    """Values and origins, as `settings.to_toml_with_origins` writes them."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        notes.append(f"{file.name}: {error.__class__.__name__}, so there is no config here")
        return {}
    found, section = {}, ""
    for line in lines:
        if match := re.fullmatch(r"\[([a-z_]+)\]", line):
            section = match[1]
        elif match := re.fullmatch(r"(\w+) = (.*?)(?:\s+# (.*))?", line):
            found[f"{section}.{match[1]}"] = match[2], match[3] or ""
    return found


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.report",
        description="Writes one page about one or several runs: curves, samples, configs and their differences.",
        epilog="Without RUN it is the run of train.py with the same options, e.g. --config configs/debug.toml.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", type=paths.argument, help="the file to write (default: report.html in the first run's folder)"
    )
    given, rest = parser.parse_known_args(argv)
    return run_cli("report", lambda: _report(given, rest))


def _report(given: argparse.Namespace, rest: Sequence[str]) -> int:
    folders = [paths.expand(text) for text in rest if not text.startswith("-")]
    if not folders or any(text.startswith("-") for text in rest):
        world_size = env_int("WORLD_SIZE", 1)
        command = cli.parse(rest, world_size=world_size, n_gpus=torch.cuda.device_count(), local_world_size=world_size)
        folders = [command.loaded.config.folder]
    out = given.out or folders[0] / "report.html"
    runs = [read_run(folder) for folder in folders]
    try:
        from torchtitan_lite.report_page import page
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "plotly":
            raise
        raise ConfigError('a report needs plotly: pip install "torchtitan_lite[report]"') from None
    try:
        out.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {out} can't be written: {error}") from None
    print(f"report  {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
