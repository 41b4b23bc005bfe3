"""Values derived from a config and a world size."""

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
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
    """Derive the layout, of the last steps if the batch grows."""
    replicate, shard = config.fsdp.mesh(world_size)
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


def usable_cores(root: Path = Path("/")) -> int:
    """The number of cores that this process may use; a scheduler or a container can limit it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = quota_of_cores(root)
    return min(cores, math.ceil(quota)) if quota else cores


def quota_of_cores(root: Path = Path("/")) -> float:
    """The processor time that this process's control groups allow, in cores; 0 without a limit.

    Each group limits those inside it. A container may see its own group at the path "/", or at the host's path.
    """
    quotas = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = mount / path.strip("/")
        for folder in [mount, *(p for p in (group, *group.parents) if mount in p.parents)]:
            with contextlib.suppress(OSError, ValueError):  # no such group here, or no limit ("max")
                if controllers:  # version 1
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                quotas.append(int(quota) / int(period))
    return min((cores for cores in quotas if cores > 0), default=0)
