"""The modes of train.py: `--print-config`, `--check-config`, `--inspect`, `--dry-run` and `--replay N`."""

from collections.abc import Callable
from functools import partial

from torchtitan_lite.checkpointing import compatibility, find, storage
from torchtitan_lite.config.cli import Command
from torchtitan_lite.config.paths import expand
from torchtitan_lite.config.schema import flatten
from torchtitan_lite.config.toml import Loaded, to_toml_with_origins
from torchtitan_lite.errors import CheckpointError, RepeatError
from torchtitan_lite.models import Transformer
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.process import local_rank
from torchtitan_lite.run.run_folder import why_not_again
from torchtitan_lite.run.session import Session
from torchtitan_lite.run.start_and_end import prepared
from torchtitan_lite.terminal import print_line
from torchtitan_lite.tools import dry_run, inspect
from torchtitan_lite.tools.incidents import replay


def run(
    command: Command,
    build: Callable[..., Session],
    train_step: Callable[[Session, int], StepRecord],
    sharded_model: Callable[..., Transformer],
) -> None:
    """Do what the command asks for. `build`, `train_step` and `sharded_model` are those of train.py."""
    notes = [f"note    {note}" for note in command.loaded.notes]
    if command.check_config:
        check(command.loaded)
    if command.print_config or command.check_config:
        notes.append(f"the configuration is fine; its run is in {command.loaded.config.folder}")
        if local_rank() == 0:
            print(to_toml_with_origins(command.loaded) if command.print_config else "\n".join(notes))
        return
    for note in notes if local_rank() == 0 else ():
        print_line(note)
    loaded, data = prepared(command.loaded)
    if command.dry_run:
        dry_run.run(loaded, data, build, train_step)
    elif command.replay is not None:
        replay.run(command.replay, loaded, data, build, train_step)
    else:
        inspect.run(loaded.config, data.vocab_size, sharded_model)


def check(loaded: Loaded) -> None:
    """Raise what a start would raise, as far as that is known without preparing text, a process group or a model."""
    if refused := why_not_again(loaded):
        raise RepeatError(refused)
    here, data = flatten(loaded.config), None
    if loaded.config.data.is_prepared:
        loaded, data = prepared(loaded)  # is refused if it is damaged
        here = flatten(loaded.config)
    config = loaded.config
    fork = not storage.find_steps(config.folder / "checkpoints")
    if fork and not config.checkpoint.resume:
        return
    source = expand(config.checkpoint.resume) if fork else config.folder
    newest = find.newest_complete(find.candidates(source), partial(storage.verify, mode="size")).folder
    if newest is None:
        raise CheckpointError(f"no checkpoint in {source} is complete")
    saved = storage.read_state(newest)
    if data:
        content = compatibility.identity(config, data)
    else:  # the text is taken for the same
        size = config.model.vocab_size or saved.identity["model.vocab_size"]
        model = {f"model.{key}": value for key, value in (config.model.resolved() | {"vocab_size": size}).items()}
        content = {key: model.get(key, value) for key, value in saved.identity.items()}
    compatibility.require_same_run(newest, saved, {**here, **content}, fork=fork)
