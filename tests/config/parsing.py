"""A command line of train.py, parsed in this process."""

from pathlib import Path

import pytest

from torchtitan_lite.config import cli, toml
from torchtitan_lite.config.registry import is_module_name
from torchtitan_lite.config.schema import REGISTRIES
from torchtitan_lite.errors import ConfigError

T5 = ["--model.family=t5", "--data.objective=span_corruption"]
PAIRS = ["--data.objective=pairs", "--data.source_key=a", "--data.target_key=b", "--data.target_len=8"]


def parse(*argv: str, world_size: int = 1, n_gpus: int = 0) -> toml.Loaded:
    return cli.parse(argv, world_size=world_size, n_gpus=n_gpus).loaded


def mistakes(*argv: str, world_size: int = 1, n_gpus: int = 0) -> str:
    """The message about a config that has mistakes."""
    with pytest.raises(ConfigError) as caught:
        parse(*argv, world_size=world_size, n_gpus=n_gpus)
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def only_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out what other tests of this process have added to the registries, so that messages list the same names."""
    for registry in REGISTRIES.values():
        for name in filter(is_module_name, [*registry]):
            monkeypatch.delitem(registry, name)
