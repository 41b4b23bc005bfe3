"""FSDP1's sharding strategies as [fsdp] keys (source: the migration guide in PyTorch's FSDP2 tutorial).

A strategy sets [fsdp] keys that are not set explicitly; an explicit key that contradicts it is an error. As in FSDP1,
a hybrid strategy shards within one machine, unless dp_replicate or dp_shard is set.
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


def strategy_keys(strategy: str, explicit: Mapping[str, Any], local_world_size: int) -> dict[str, Any]:
    """The [fsdp] keys of a strategy, given the explicit ones; empty for an unknown strategy."""
    keys = dict(STRATEGIES.get(strategy, {}))
    if "HYBRID" in strategy and explicit.get("dp_shard", -1) == -1 and explicit.get("dp_replicate", -1) == -1:
        keys["dp_shard"] = local_world_size
    return keys


def contradiction(strategy: str, key: str, value: Any) -> str:
    """How an explicit [fsdp] key contradicts a strategy; empty if it does not."""
    wanted = STRATEGIES.get(strategy, {})
    if key in wanted and value not in (wanted[key], "default" if key == "reshard_after_forward" else -1):
        return f'sharding_strategy = "{strategy}" means {key} = {str(wanted[key]).lower()}'
    if key == "dp_replicate" and "HYBRID" in strategy and value == 1:
        return f'sharding_strategy = "{strategy}" needs replicas; without them use "FULL_SHARD" or "SHARD_GRAD_OP"'
    if key == "dp_shard" and "HYBRID" in strategy and value == 1:
        return f'sharding_strategy = "{strategy}" needs shards; without them use "NO_SHARD"'
    return ""
