"""Reports on one or several runs on one page: `python -m torchtitan_lite.report RUN [RUN ...]` writes report.html.

The page contains plotly's JavaScript and needs no network. runs.py reads the run folders, figure.py draws the curves,
and page.py writes the page.
"""

import argparse
from collections.abc import Sequence

import torch

from torchtitan_lite import commands
from torchtitan_lite.config import cli, paths
from torchtitan_lite.environment import env_int
from torchtitan_lite.errors import ConfigError, DataError, UserError
from torchtitan_lite.files import write_durably
from torchtitan_lite.tools.report.runs import read_run, table

OPTIONS: commands.Options = {
    "--out": {
        "type": paths.expand,
        "help": "the file to write (default: report.html in the run's folder, or in the folder above it for several "
        "runs)",
    },
    "--table": {"action": "store_true", "help": "print a table, the best validation first; write no page"},
}


def main(argv: Sequence[str] | None = None) -> int:
    return commands.run(
        "report",
        argv,
        OPTIONS,
        _report,
        others=True,
        description="Write one page about one or several runs: curves, samples, configs and their differences.",
        epilog="Without RUN: the run of train.py with the same options, e.g. --config configs/debug.toml.",
    )


def _report(args: argparse.Namespace) -> int:
    folders = [paths.expand(text) for text in args.rest if not text.startswith("-")]
    if not folders or any(text.startswith("-") for text in args.rest):
        n, n_gpus = env_int("WORLD_SIZE", 1), torch.cuda.device_count()
        command = cli.parse(args.rest, flags=["out", "table"], world_size=n, n_gpus=n_gpus, local_world_size=n)
        folders = [command.loaded.config.folder]
    runs, notes = [], list[str]()
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except UserError as error:
            notes.append(str(error))
    if not runs:
        raise DataError("\n  ".join(notes))
    notes = [f"note  {note}" for note in notes]
    if args.table:
        print("\n".join([table(runs), *notes]))
        return 0
    out = args.out or (folders[0] if len(folders) == 1 else folders[0].resolve().parent) / "report.html"
    try:
        from torchtitan_lite.tools.report.page import page
    except ImportError as error:
        raise ConfigError(f'a report needs plotly: pip install "torchtitan_lite[report]" ({error})') from None
    # JSON can hold lone surrogates, which UTF-8 can't encode; and a browser must not read half a page
    write_durably(out, page(runs).encode(errors="backslashreplace"))
    print("\n".join([*notes, f"report  {out}"]))
    return 0
