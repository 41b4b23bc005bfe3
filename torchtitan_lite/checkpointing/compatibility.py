"""Compares a checkpoint with the run that resumes it."""

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from torchtitan_lite import progress
from torchtitan_lite.checkpointing import shards, storage
from torchtitan_lite.checkpointing.find import find
from torchtitan_lite.checkpointing.safetensors_file import specs_of
from torchtitan_lite.checkpointing.state import TrainState
from torchtitan_lite.checkpointing.tensor_names import Tensors
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.paths import expand
from torchtitan_lite.config.schema import Config, bitwise_keys, flatten, known_keys, nested, resume_rule
from torchtitan_lite.config.toml import format_value
from torchtitan_lite.cpu import widens
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.environment import this_command
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.terminal import counted


def _imported(config_json: Path) -> dict[str, Any]:
    """Return what an export gives back: the `bos_token_id`, and `eos_token_id` if it lists several."""
    content = storage.read_json(config_json)
    ends = content.get("eos_token_id")
    return {"bos_token_id": content.get("bos_token_id"), **({"eos_token_id": ends} if isinstance(ends, list) else {})}


def fresh_state(
    config: Config, data: DataSet, process: Process, validation: Mapping[str, int], tasks: Mapping[str, str]
) -> TrainState:
    """Return the state before the first step. `validation` is Validation.description(), `tasks` a hash per task."""
    source = expand(config.model.init_from)
    return TrainState(
        end_token=data.end_token,
        begin_tokens=[*data.sources[0].meta.marks[1:]],
        imported={}
        if not config.model.init_from or config.has_checkpoint or config.checkpoint.resume
        else _imported(source / "config.json")
        if (source / "config.json").is_file()
        else storage.read_state(find(source, "size")[0]).imported,
        validation=validation,
        tasks=tasks,
        must_match=values_to_match(config, data),
        bitwise_setting=bitwise_setting(config, process),
        config=flatten(config),
    )


def values_to_match(config: Config, data: DataSet) -> dict[str, Any]:
    """Return the hashes of tokenizer and tokens, the order of sources, and the [model] keys with derived values."""
    content: dict[str, Any] = {"tokenizer": data.tokenizer_sha256, **data.hashes()}
    if len(data.sources) > 1:
        content["order of data.sources"] = [*config.data.sources]  # decides the order of samples
    model = config.model.resolved() | {"vocab_size": config.model.vocab_size or data.vocab_size}
    rules = {key: resume_rule(f"model.{key}") for key in model}
    fixed = [key for key, rule in rules.items() if rule.rule in ("fork", "refused") and rule.changes != "start"]
    return content | {f"model.{key}": model[key] for key in fixed}


def saved_config(folder: Path, values: Mapping[str, Any]) -> Config:
    """Return the [run], [model], [data], [tokenizer] and [train] of a checkpoint or run, from values by "section.key".

    Other sections may name the user's own parts, which a tool does not import.

    Raises:
        CheckpointError: the values are invalid.
    """
    read = "run.", "model.", "data.", "tokenizer.", "train."
    try:
        return Config.model_validate(nested({key: value for key, value in values.items() if key.startswith(read)}))
    except ValidationError as error:
        first = error.errors()[0]
        key, why = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise CheckpointError(
            f"{folder}: the config that it was trained with can't be read: {key} = {first['input']!r}: {why}"
        ) from None


def require_same_run(folder: Path, saved: TrainState, expected: Mapping[str, Any], *, fork: bool) -> None:
    """Check that this run's values match its checkpoint's; a fork only needs the tensors to mean the same.

    Args:
        expected: `values` of this run's state.
        fork: the checkpoint belongs to a different run.

    Raises:
        CheckpointError: values differ; the message has both values of each key, and the command that forks.
    """
    before, expected = (  # phases that have not begun may change
        {**values, "train.phases": values.get("train.phases", [])[: len(saved.phases)]}
        for values in (saved.values, expected)
    )
    if not (changed := _changed(saved.must_match, before, expected, fork=fork)):
        return
    from torchtitan_lite import hints

    run, step = folder.parent.parent, saved.step
    head = f"{folder} can't be forked, because" if fork else f"{run} has made {counted(step, 'step')}, and"
    lines = [
        f"{head} its values differ from this command's:",
        *hints.differences(changed, {key: expected[key] for key in changed if key in expected}),
    ]
    keys = [
        *changed,
        *["tokenizer.path"] * ("tokenizer" in changed),
        *["data.path", "data.sources"] * any(key not in known_keys() for key in changed),
    ]
    changeable = [key for key in keys if key in known_keys() and before[key] != expected[key]]
    if changeable:
        back = " ".join(hints.option(key, before[key], format_value(before[key])) for key in changeable)
        lines.append(f"continue with the run's values: {back}")
    if "tokenizer" in changed:
        lines.append(f"different text needs the run's tokenizer: --tokenizer.path={run / 'tokenizer.json'}")
    other = "or " * bool(changeable or "tokenizer" in changed)
    if fork or any(_rule_of(key) == "refused" for key in changed):
        lines.append(f"{other}start a new run with --run.name=NEW{' and without checkpoint.resume' if fork else ''}")
    else:
        command = this_command(run__name=f"{run.name}-from-{step}", checkpoint__resume=str(folder))
        lines.append(f"{other}fork it: a new run continues from here with the new values:\n    {command}")
    raise CheckpointError("\n  ".join(lines))


def _changed(
    must_match: Mapping[str, Any], before: Mapping[str, Any], expected: Mapping[str, Any], *, fork: bool
) -> dict[str, Any]:
    """Return the saved values that differ from this run's, and must not."""
    content = [key for key in {**must_match, **expected} if key not in known_keys()]  # hashes of text and tokenizer
    keys = [*content, *(key for key in expected if key in known_keys() and key in before)]
    rules = {key: _rule_of(key) for key in keys if before.get(key) != expected.get(key)}
    if not expected.get("model.init_from"):
        rules.pop("model.init_from", None)  # only read at the beginning of the run
    if "tokenizer" in rules:
        rules.pop("model.vocab_size", None)  # follows from the tokenizer
    own_text = expected.get("data.path") or expected.get("data.sources")  # a fork may have its own
    refused = {"refused"} if fork else {"refused", "fork"}
    return {
        key: before.get(key)
        for key, rule in rules.items()
        if rule in refused or (fork and key in content and not own_text)
    }


def _rule_of(key: str) -> str:
    """Return the resume rule of a config key, or of a content hash (tokenizer or data)."""
    if key in known_keys():
        rule = resume_rule(key)
        return "allowed" if rule.changes == "content" else rule.rule  # the content is compared
    return "refused" if key == "tokenizer" else "fork"


@progress.working("reading the names of tensors")
def require_same_tensors(folder: Path, tensors: Tensors) -> None:
    """Raise CheckpointError if names or shapes of a checkpoint's tensors differ from these."""
    saved = {name: shape for name, (_, shape) in shards.read_places(folder).specs.items()}
    storage.require_equal(folder, saved, shapes_of(tensors), "model or optimizer")


def require_same_weights(weights: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if the initial weights' names or shapes differ from the model's."""
    advice = "set the [model] keys to the folder's values, and model.vocab_size or tokenizer.path to its vocabulary"
    storage.require_equal(Path("model.init_from"), shapes_of(weights), shapes_of(targets), "model", advice)


def require_finite(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raise CheckpointError if this rank's part of loaded weights has a NaN or an infinite value."""
    if bad := [
        name
        for name, tensor in tensors.items()
        for part in [own_part(tensor)[0]]
        # without a temporary tensor: a NaN is both the smallest and the largest value
        if part.numel() and not part.is_meta and not torch.stack(part.aminmax()).isfinite().all()
    ]:
        raise CheckpointError(
            f"{folder} can't be used: {counted(len(bad), 'tensor')} of it with NaN or infinite values, the first is "
            f"{bad[0]}: damaged, or saved by a run that diverged"
        )


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return shapes, without reading lazy tensors."""
    return {name: shape for name, (_, shape) in specs_of(tensors).items()}


def optimizer_as_saved(optimizer: torch.optim.Optimizer, saved: TrainState) -> AbstractContextManager[None]:
    """While a checkpoint is loaded, let the optimizer keep averaged weights if and only if the checkpoint has them."""
    has_averages = bool(saved.config.get("optim.ema_decay"))
    if has_averages == bool(optimizer.defaults.get("ema_decay")):
        return nullcontext()
    from torchtitan_lite.optim.average import as_saved

    return as_saved(optimizer, has_averages)


def bitwise_setting(config: Config, process: Process) -> dict[str, Any]:
    """Return what must be equal for a bitwise resume: everything that can change how results are rounded."""
    on_gpu = process.device.type == "cuda"
    values, layout, family = flatten(config), derive(config, process.world_size), FAMILIES[config.model.family]
    # Shared memory sums in rank order. gloo and NCCL sum more than two ranks in an order that depends on the position
    # in a group's buffer; a sum of two is equal in either order.
    in_rank_order = config.speed.shared_memory and not on_gpu and process.local_world_size == process.world_size
    # all blocks of t5 share tables, and their gradients are added group by group
    groups_matter = family.encoder_decoder or (process.world_size > 2 and not in_rank_order)
    checkpointing = config.activation_checkpointing
    dynamic_shapes = config.compile.enabled and config.data.objective == "pairs"  # see cpu/attention.py
    return {
        "world_size": process.world_size,
        **{name: values[key] for key, name in bitwise_keys().items()},
        # keys that have an effect only sometimes: their effect here
        "dp_replicate": layout.dp_replicate,
        "compile": config.compile.backend if config.compile.enabled else "off",
        # the recomputation is compiled into the backward pass
        "activation_checkpointing": f"{checkpointing.mode} {checkpointing.every}" if config.compile.enabled else "any",
        "block_attention": config.speed.block_attention and not on_gpu and not dynamic_shapes,
        "fused_functions": config.speed.fused_functions and family.fused_functions and not on_gpu,
        "blocks_per_group": config.fsdp.blocks_per_group if groups_matter else 1,
        "widen_matmuls": widens(config, process),
        "shared_memory": in_rank_order and layout.dp_shard > 2,
        "shared_memory_copies": in_rank_order and layout.dp_replicate > 2,
        "device": torch.cuda.get_device_name(process.device) if on_gpu else "cpu",
        "cpu": "" if on_gpu else re.findall(r"model name\s*: (.*)|\Z", Path("/proc/cpuinfo").read_text())[0],
        "instructions": "" if on_gpu else torch.backends.cpu.get_cpu_capability(),
        "tf32": config.run.tf32 and on_gpu,
        "deterministic": config.run.deterministic or not on_gpu,
        "threads": process.threads,
        "torch": torch.__version__,
    }
