"""Values derived from a config and a world size."""

import math
import os
from dataclasses import dataclass
from typing import Any

from torchtitan_lite.config.schema import Config


@dataclass(frozen=True)
class Layout:
    """The mesh and the batch layout of a run."""

    dp_replicate: int
    dp_shard: int
    grad_accum_steps: int
    masked_sequences: int  # fully masked sequences that pad the last micro-batches of a step
    tokens_per_step: int  # of the targets


def derive(config: Config, world_size: int) -> Layout:
    """Derive the layout, of the last steps if the batch grows. A dp_* of -1 takes all remaining ranks."""
    replicate, shard = config.fsdp.dp_replicate, config.fsdp.dp_shard
    if replicate == -1:
        replicate = 1 if shard == -1 else max(world_size // shard, 1)
    if shard == -1:
        shard = max(world_size // replicate, 1)
    train = config.train
    per_round = world_size * train.micro_batch_size
    size = train.batch_size(train.steps)
    accum = math.ceil(size / per_round)
    return Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        grad_accum_steps=accum,
        masked_sequences=accum * per_round - size,
        tokens_per_step=size * config.target_len,
    )


def flatten(config: Config) -> dict[str, Any]:
    """Every value by "section.key", as JSON types."""
    tree = config.model_dump(mode="json")
    return {f"{section}.{key}": value for section, table in tree.items() for key, value in table.items()}


def usable_cores() -> int:
    """The number of cores that this process may use; a scheduler can limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
