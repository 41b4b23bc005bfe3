"""One page about one or several runs: `python -m torchtitan_lite.report RUN [RUN ...]` writes report.html.

The page contains plotly's JavaScript and needs no network. runs.py reads the run folders, figure.py draws the curves,
and page.py writes the page.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from torchtitan_lite.config import cli, paths
from torchtitan_lite.errors import ConfigError, DataError, run_cli
from torchtitan_lite.files import write_durably
from torchtitan_lite.process import env_int
from torchtitan_lite.tools.report.runs import Run, read_run, table

LIVE_S = 10


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.report",
        description="Writes one page about one or several runs: curves, samples, configs and their differences.",
        epilog="Without RUN: the run of train.py with the same options, e.g. --config configs/debug.toml.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out",
        type=paths.expand,
        help="the file to write (default: report.html in the run's folder, or in the folder above it for several runs)",
    )
    parser.add_argument("--table", action="store_true", help="print a table, the best validation first; write no page")
    parser.add_argument(
        "--live",
        type=int,
        nargs="?",
        const=LIVE_S,
        metavar="SECONDS",
        help=f"write the page again every SECONDS ({LIVE_S}) until the runs have ended; the open page reloads itself",
    )
    args, rest = parser.parse_known_args(argv)
    return run_cli("report", lambda: _report(args, rest))


def _report(args: argparse.Namespace, rest: Sequence[str]) -> int:
    folders = [paths.expand(text) for text in rest if not text.startswith("-")]
    if not folders or any(text.startswith("-") for text in rest):
        world_size = env_int("WORLD_SIZE", 1)
        n_gpus = torch.cuda.device_count()
        own = "out", "table", "live"
        command = cli.parse(rest, False, own, world_size=world_size, n_gpus=n_gpus, local_world_size=world_size)
        folders = [command.loaded.config.folder]
    if args.live is not None and args.live < 1:
        raise ConfigError(f"--live={args.live} should be 1 second or more, e.g. --live {LIVE_S}")
    if args.table:
        print(_table(folders))
        return 0
    above = folders[0].parent if folders[0].name not in ("", "..") else folders[0].resolve().parent
    out = args.out or (folders[0] if len(folders) == 1 else above) / "report.html"
    if args.live:
        _write_live(folders, out, args.live)
    else:
        _write([read_run(folder) for folder in folders], out)
    print(f"report  {out}")
    return 0


def _table(folders: Sequence[Path]) -> str:
    """The table; a line for each folder without a step.

    Raises:
        DataError: no folder has one.
    """
    runs, notes = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except DataError as error:
            notes.append(str(error))
    if not runs:
        raise DataError("\n  ".join(notes))
    return "\n".join([table(runs), *(f"note  {note}" for note in notes)])


def _write_live(folders: Sequence[Path], out: Path, seconds: int) -> None:
    """Write the page every so many seconds. The last one, when no run is active, does not reload itself."""
    announced = False
    while True:
        try:
            runs = [read_run(folder) for folder in folders]
            active = any(run.status.active for run in runs)
            _write(runs, out, seconds if active else 0)
        except DataError as error:  # no step yet
            if not any(folder.is_dir() for folder in folders):
                raise
            active = True
            if not announced:
                print(f"waiting {error}", flush=True)
        else:
            if not announced or not active:
                print(f"live    open {out} in a browser; Ctrl-C ends it" if active else "live    ended", flush=True)
        announced = True
        if not active:
            return
        time.sleep(seconds)


def _write(runs: list[Run], out: Path, reload_s: int = 0) -> None:
    try:
        from torchtitan_lite.tools.report.page import page
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "plotly":
            raise
        raise ConfigError('a report needs plotly: pip install "torchtitan_lite[report]"') from None
    text = page(runs, reload_s)
    try:
        # JSON can hold lone surrogates, which UTF-8 can't encode
        write_durably(out, text.encode(errors="backslashreplace"))  # a browser must not read half a page
    except OSError as error:
        raise ConfigError(f"--out: {out} can't be written: {error}") from None
