"""The modes of train.py: `--print-config`, `--check-config`, `--inspect`, `--dry-run` and `--replay N`."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpointing import compatibility, find, storage
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.config.cli import Command
from torchtitan_lite.config.paths import expand
from torchtitan_lite.config.schema import Config, FsdpConfig, flatten
from torchtitan_lite.config.toml import Loaded, to_toml_with_origins
from torchtitan_lite.distributed.fsdp import Group, groups_of
from torchtitan_lite.distributed.process_group import build_mesh, process_group
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.environment import local_rank
from torchtitan_lite.errors import CheckpointError, ConfigError, RepeatError
from torchtitan_lite.models import Transformer
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run import phases, run_folder
from torchtitan_lite.run.console import phase_lines
from torchtitan_lite.run.session import Session
from torchtitan_lite.run.start_and_end import prepared
from torchtitan_lite.terminal import columns, print_line
from torchtitan_lite.tools import dry_run, replay
from torchtitan_lite.tools.status import is_locked

_GROUPS = "group", "parameters", "frozen", "shard MiB", "full MiB", "computes", "reduces", "reshard", "placements"
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def run(
    command: Command,
    build: Callable[..., Session],
    train_step: Callable[[Session, int], StepRecord],
    sharded_model: Callable[..., Transformer],
) -> None:
    """Run the mode that the command asks for. `build`, `train_step` and `sharded_model` are those of train.py."""
    notes = [f"note    {note}" for note in command.loaded.notes]
    if command.modes["check_config"]:
        check(command.loaded)
    if (url := command.loaded.config.url) and (command.modes["check_config"] or command.modes["dry_run"]):
        from torchtitan_lite.bucket import Bucket

        Bucket(url).now()
    if command.modes["print_config"] or command.modes["check_config"]:
        notes.append(f"the configuration is fine; its run is in {command.loaded.config.folder}{url and f' and {url}'}")
        if local_rank() == 0:
            print(to_toml_with_origins(command.loaded) if command.modes["print_config"] else "\n".join(notes))
        return
    for note in notes if local_rank() == 0 else ():
        print_line(note)
    loaded, data = prepared(command.loaded)
    if command.modes["dry_run"]:
        dry_run.run(loaded, data, build, train_step)
    elif command.modes["replay"] is not None:
        replay.run(command.modes["replay"], loaded, data, build, train_step)
    else:
        inspect(loaded.config, data.vocab_size, sharded_model)


def check(loaded: Loaded) -> None:
    """Raise the errors of a start that can be found without preparing text, a process group or a model.

    A run that another job has locked is one of them: the next start of this job would fail, too.
    """
    by = run_folder.holder(loaded.config.folder)
    if is_locked(loaded.config.folder) and run_folder.is_of_another_job(by):
        raise ConfigError(run_folder.in_use(loaded.config.folder, by))
    folder = loaded.config.folder
    if loaded.config.url:
        with contextlib.suppress(CheckpointError):  # the bucket does not have the run yet
            folder = expand(loaded.config.url)
    if refused := run_folder.why_not_again(loaded, folder):
        raise RepeatError(refused)
    data = None
    if loaded.config.data.is_prepared:
        loaded, data = prepared(loaded, folder)  # refuses damaged data
        for line in phase_lines(loaded.config, phases.planned(loaded.config, data, TrainState())):
            print_line(line)
    config = loaded.config
    own = folder / "checkpoints"
    steps = storage.find_steps(own)
    fork = not (steps or storage.incomplete_folders(own))
    if fork and not config.checkpoint.resume:
        return
    source = expand(config.checkpoint.resume) if fork else folder
    folders = find.candidates(source) if fork or steps else []

    def verify(found: Path) -> list[str]:  # a bucket's listing has the sizes
        return [] if storage.bucket_of(found) else storage.verify(found, "size")

    newest = find.newest_complete(folders, verify).folder
    if newest is None:
        raise CheckpointError(f"no checkpoint in {source} is complete")
    saved = storage.read_state(newest)
    if data:
        content = compatibility.values_to_match(config, data)
    else:  # assume that the text is the same
        size = config.model.vocab_size or saved.must_match["model.vocab_size"]
        model = {f"model.{key}": value for key, value in (config.model.resolved() | {"vocab_size": size}).items()}
        content = {key: model.get(key, value) for key, value in saved.must_match.items()}
    compatibility.require_same_run(newest, saved, {**flatten(config), **content}, fork=fork)


# --- the sharded model -------------------------------------------------------------------------------------------


def inspect(config: Config, vocab_size: int, sharded_model: Callable[..., Transformer]) -> None:
    """Print the sharded model and its FSDP groups, before anything is allocated."""
    with process_group(config.run) as process:
        model = sharded_model(config, vocab_size, build_mesh(config.fsdp, process.device))
        if process.rank == 0:
            print(describe(model, config.fsdp))


def describe(model: Transformer, config: FsdpConfig) -> str:
    """Return the wrapped model as PyTorch prints it, and a table of its groups.

    Bytes are per rank: its shards in float32, and the gathered group in the dtype of the computation.
    """
    parameters = dict(model.named_parameters())
    rows = [_GROUPS, *(_row(group, parameters) for group in groups_of(model, config))]
    return "\n".join([str(model), "", *columns(rows, right=range(1, 5))])


def _row(group: Group, parameters: dict[str, torch.nn.Parameter]) -> tuple[str, ...]:
    members = [parameters[name] for name in group.parameters]
    numel = sum(p.numel() for p in members)
    placements = sorted({str(p.placements) if isinstance(p, DTensor) else "not sharded" for p in members})
    return (
        group.name,
        f"{numel:,}",
        f"{sum(p.numel() for p in members if not p.requires_grad):,}",
        f"{sum(own_part(p)[0].nbytes for p in members) / 2**20:.2f}",
        f"{numel * group.param_dtype.itemsize / 2**20:.2f}",
        _SHORT[group.param_dtype] + (f" -> {_SHORT[group.output_dtype]}" if group.output_dtype else ""),
        _SHORT[group.reduce_dtype],
        str(group.reshard_after_forward),
        ", ".join(placements),
    )
