"""One page about one or several runs: `python -m torchtitan_lite.report RUN [RUN ...]` writes report.html.

The page contains plotly's JavaScript and needs no network. runs.py reads the run folders, page.py writes the page.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from torchtitan_lite.config import cli, paths
from torchtitan_lite.distributed.process_group import env_int
from torchtitan_lite.errors import ConfigError, run_cli
from torchtitan_lite.tools.report.runs import read_run


def main(argv: Sequence[str]) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_lite.report",
        description="Writes one page about one or several runs: curves, samples, configs and their differences.",
        epilog="Without RUN: the run of train.py with the same options, e.g. --config configs/debug.toml.",
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
        from torchtitan_lite.tools.report.page import page
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "plotly":
            raise
        raise ConfigError('a report needs plotly: pip install "torchtitan_lite[report]"') from None
    try:
        # JSON can hold lone surrogates, which UTF-8 can't encode
        out.write_text(page(runs), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--out: {out} can't be written: {error}") from None
    print(f"report  {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
