"""A command line of train.py, parsed in this process."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from torchtitan_lite.config import cli, toml
from torchtitan_lite.errors import ConfigError


def parse(*argv: str, world_size: int = 1, n_gpus: int = 0) -> toml.Loaded:
    return cli.parse(argv, world_size=world_size, n_gpus=n_gpus).loaded


def mistakes(*argv: str, world_size: int = 1, n_gpus: int = 0) -> str:
    """The message about a config that has mistakes."""
    with pytest.raises(ConfigError) as caught:
        parse(*argv, world_size=world_size, n_gpus=n_gpus)
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def one_of(names: Iterable[str]) -> str:
    """How a message lists choices, of a registry for example: 'a', 'b' or 'c'."""
    *others, last = map(repr, names)
    return f"should be {', '.join(others)} or {last}"
