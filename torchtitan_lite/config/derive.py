"""Values derived from a config and a world size."""

import math
from dataclasses import dataclass

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
    """Derive the layout, for the last steps if the batch grows."""
    replicate, shard = config.fsdp.mesh_shape(world_size)
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
