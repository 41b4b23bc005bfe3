"""FSDP1's sharding strategies, and what they stand for here (the migration guide of PyTorch's FSDP2 tutorial).

A strategy fills in [fsdp] keys below those that are set explicitly, as a model size does; one that says something else
than the strategy is an error. FSDP1 makes the copies of a hybrid strategy as large as a machine, and so does this,
unless dp_replicate or dp_shard says otherwise.
"""

from collections.abc import Mapping
from typing import Any

STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"reshard_after_forward": True, "dp_replicate": 1},
    "SHARD_GRAD_OP": {"reshard_after_forward": False, "dp_replicate": 1},
    "HYBRID_SHARD": {"reshard_after_forward": True},
    "_HYBRID_SHARD_ZERO2": {"reshard_after_forward": False},
    "NO_SHARD": {"reshard_after_forward": False, "dp_shard": 1},
}


def stands_for(strategy: str, explicit: Mapping[str, Any], local_world_size: int) -> dict[str, Any]:
    """The [fsdp] keys of a strategy; none for an unknown one.

    Args:
        explicit: the [fsdp] keys that are set.
        local_world_size: the ranks of a machine.
    """
    keys = dict(STRATEGIES.get(strategy, {}))
    if "HYBRID" in strategy and explicit.get("dp_shard", -1) == -1 and explicit.get("dp_replicate", -1) == -1:
        keys["dp_shard"] = local_world_size
    return keys


def contradiction(strategy: str, key: str, value: Any) -> str:
    """What is wrong with an explicit [fsdp] key beside a strategy; empty if nothing is."""
    wanted = STRATEGIES.get(strategy, {})
    if key in wanted and value not in (wanted[key], "default" if key == "reshard_after_forward" else -1):
        return f'sharding_strategy = "{strategy}" stands for {key} = {str(wanted[key]).lower()}'
    if key == "dp_replicate" and "HYBRID" in strategy and value == 1:
        return f'sharding_strategy = "{strategy}" means copies; without them it is "FULL_SHARD" or "SHARD_GRAD_OP"'
    if key == "dp_shard" and "HYBRID" in strategy and value == 1:
        return f'sharding_strategy = "{strategy}" means shards; without them it is "NO_SHARD"'
    return ""
