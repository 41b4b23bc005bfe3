"""Config checks that need the model's parameter names or a tokenizer, but no process group."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from torchtitan_lite import models
from torchtitan_lite.config.paths import expand, is_prepared
from torchtitan_lite.config.patterns import unused
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.fsdp import groups_of
from torchtitan_lite.distributed.overrides import wrong_columns, wrong_overrides
from torchtitan_lite.environment import env_int
from torchtitan_lite.errors import DataError, shortened
from torchtitan_lite.models import Transformer
from torchtitan_lite.optim.groups import freeze


def check_patterns(config: Config) -> dict[str, str]:
    """Check parameter patterns against the model. Returns the broken rules, as `broken_rules` does."""
    optim, fsdp = config.optim, config.fsdp
    if not any((optim.freeze, optim.groups, fsdp.precision_overrides, fsdp.shard_columns, config.speed.float8)):
        return {}
    with torch.device("meta"):
        model = models.build(config.model, config.model.vocab_size or config.tokenizer.vocab_size)
    shards = fsdp.mesh_shape(env_int("WORLD_SIZE", 1))[1]
    wrong: dict[str, Iterable[str]] = {
        "optim.freeze": [*wrong_freezing(model, optim.freeze)],  # now: the next line looks at what is left to train
        "optim.groups": unused(
            "optim.groups",
            [name for name, parameter in model.named_parameters() if parameter.requires_grad],
            [group.match for group in optim.groups],
        ),
        "fsdp.precision_overrides": wrong_overrides(
            {group.name: group.parameters for group in groups_of(model, fsdp)}, fsdp
        ),
        "fsdp.shard_columns": wrong_columns(model, fsdp.shard_columns, shards),
    }
    if config.speed.float8:
        from torchtitan_lite.distributed.float8 import wrong_shapes

        wrong["speed.float8"] = wrong_shapes(model, shards)
    return {f"{key} {i}": message for key, messages in wrong.items() for i, message in enumerate(messages)}


def wrong_freezing(model: Transformer, patterns: Sequence[str]) -> Iterator[str]:
    """Freeze parameters. Yields a message for each pattern that matches none, and if none is left to train."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:  # each by itself, because patterns may overlap
        yield from unused("optim.freeze", names, [pattern], field="")
    freeze(model, patterns)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        yield f"optim.freeze = {shortened(patterns)} leaves no parameter to train"


def check_tasks(config: Config) -> dict[str, str]:
    """Check tasks, and an existing tokenizer for the objective. Returns the broken rules."""
    if config.data.objective != "causal" and config.tokenizer.path:
        from torchtitan_lite.data.spans import wrong_tokenizer

        if found := wrong_tokenizer(config):
            return found
    if config.tasks:
        from torchtitan_lite.run.tasks import wrong_tasks

        return wrong_tasks(config)
    return {}


def check_init_from(config: Config) -> dict[str, str]:
    """Check that model.init_from holds this model, without reading weights. Returns the broken rules."""
    if not config.model.init_from:
        return {}
    from torchtitan_lite.huggingface.weights import check_source

    return check_source(config)


def check_text(config: Config) -> dict[str, str]:
    """Look for text in the folders of [data], as preparation does. Returns the broken rules."""
    data = config.data
    folders = [path for path in data.texts if not is_prepared(path) and expand(path).is_dir()]
    if not folders and not data.text_suffixes:
        return {}
    from torchtitan_lite.data.prepare.texts import checked_suffixes, find

    try:
        checked_suffixes(data.text_suffixes)
        for folder in folders:
            find(folder, [data.text_key], data.text_suffixes)
    except DataError as error:
        return {"data.path data.sources data.text_suffixes": str(error)}
    return {}


ALL = [check_patterns, check_tasks, check_init_from, check_text]
