"""What train.py does instead of training: `--inspect`, `--dry-run` and `--replay N`."""

from collections.abc import Callable

from torchtitan_lite.config.cli import Command
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.models import Transformer
from torchtitan_lite.tools import dry_run, inspect
from torchtitan_lite.tools.incidents import replay
from torchtitan_lite.training.session import Session


def run(
    command: Command,
    loaded: Loaded,
    data: DataSet,
    build: Callable[..., Session],
    step: replay.Step,
    sharded_model: Callable[..., Transformer],
) -> None:
    """Carry out the mode of a command. `build`, `step` and `sharded_model` are those of train.py."""
    if command.dry_run:
        dry_run.run(loaded, data, build, step)
    elif command.replay is not None:
        replay.run(command.replay, loaded, data, build, step)
    else:
        inspect.run(loaded.config, data.vocab_size, sharded_model)
