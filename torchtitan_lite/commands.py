"""Parses the command line of a tool. Its options are a table: by name, the arguments of argparse's `add_argument`."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtitan_lite.errors import run_cli
from torchtitan_lite.terminal import prepare_streams

Options = Mapping[str, Mapping[str, Any]]
SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}  # one or more values, also repeatedly


def add_options(parser: argparse._ActionsContainer, options: Options) -> None:
    """Add a table of options. A name may have several spellings, separated by a space."""
    for names, arguments in options.items():
        parser.add_argument(*names.split(), **arguments)


def parse(
    command: str,
    argv: Sequence[str] | None,
    options: Options,
    *,
    exclusive: Sequence[Options] = (),
    others: bool = False,
    **about: Any,
) -> argparse.Namespace:
    """Parse a command line.

    Args:
        command: for example "python -m torchtitan_lite.status".
        argv: the words; None: those of this process.
        exclusive: further tables; of each, a command line may give one option.
        others: whether unknown words are allowed. They are in `rest`.
        about: further arguments of ArgumentParser.
    """
    parser = argparse.ArgumentParser(prog=command, allow_abbrev=False, **about)
    add_options(parser, options)
    for table in exclusive:
        add_options(parser.add_mutually_exclusive_group(), table)
    arguments, rest = parser.parse_known_args(argv)
    if rest and not others:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    return arguments


def run(
    name: str, argv: Sequence[str] | None, options: Options, main: Callable[[argparse.Namespace], int], **how: Any
) -> int:
    """Parse the command line of `python -m torchtitan_lite.NAME`, run it, and return the exit code.

    Args:
        main: is called with the options, and returns the exit code.
        how: further arguments of `parse`.
    """
    prepare_streams()
    return run_cli(name.split(".")[-1], lambda: main(parse(f"python -m torchtitan_lite.{name}", argv, options, **how)))
