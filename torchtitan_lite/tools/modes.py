"""What train.py does in place of training: `--inspect`, `--dry-run` and `--replay N`."""

from collections.abc import Callable

from torchtitan_lite.config.cli import Command
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.process_group import build_mesh, process_group
from torchtitan_lite.models import Transformer
from torchtitan_lite.tools import dry_run, inspect
from torchtitan_lite.tools.dry_run import Step
from torchtitan_lite.tools.incidents import replay
from torchtitan_lite.training.session import Session


def run(
    command: Command,
    loaded: Loaded,
    data: DataSet,
    build: Callable[..., Session],
    step: Step,
    sharded_model: Callable[..., Transformer],
) -> None:
    """Do what the command asks for. `build`, `step` and `sharded_model` are those of train.py."""
    config = loaded.config
    if command.dry_run:
        dry_run.run(loaded, data, build, step)
    elif command.replay is not None:
        replay.run(command.replay, loaded, data, build, step)
    else:
        with process_group(config.run) as world:
            model = sharded_model(config, data.vocab_size, build_mesh(derive(config, world.world_size), world.device))
            if world.rank == 0:
                print(inspect.describe(model, config.fsdp))
