"""Agreement between ranks: equal configs and versions, and the outcome of an action on rank 0."""

import platform
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchtitan_lite import __version__
from torchtitan_lite.config.derive import flatten
from torchtitan_lite.config.schema import Config
from torchtitan_lite.distributed.process_group import World, from_all_ranks, from_rank0
from torchtitan_lite.errors import ConfigError

T = TypeVar("T")


def outcome_on_rank0(
    rank: int,
    action: Callable[[], T],
    group: dist.ProcessGroup | None,
    expected: tuple[type[Exception], ...] = (Exception,),
) -> tuple[T | None, str]:
    """Run an action on rank 0. Every rank of the group gets its result, or the text of an expected error."""
    outcome: tuple[T | None, str] = None, ""
    if rank == 0:
        try:
            outcome = action(), ""
        except expected as error:
            outcome = None, str(error) or repr(error)
    return from_rank0(outcome, group)


def require_agreement(config: Config, world: World) -> list[str]:
    """Compare versions and config between all ranks. Returns the host names in the order of their ranks.

    Raises:
        ConfigError: on every rank, with each value that differs and the ranks and hosts that have it.
    """
    mine: dict[str, Any] = {
        "torchtitan_lite": __version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": world.device.type,
        **flatten(config),
    }
    reports = from_all_ranks((socket.gethostname(), mine))
    hosts = [host for host, _ in reports]
    differences = []
    for key in sorted({key for _, values in reports for key in values}):
        ranks_of: dict[str, list[int]] = {}
        for rank, (_, values) in enumerate(reports):
            ranks_of.setdefault(repr(values.get(key)), []).append(rank)
        if len(ranks_of) > 1:
            shown = "; ".join(f"{value} on {_ranks(ranks, hosts)}" for value, ranks in ranks_of.items())
            differences.append(f"{key}: {shown}")
    if differences:
        raise ConfigError("\n  ".join(["the ranks differ in config or versions:", *differences]))
    return list(dict.fromkeys(hosts))


def _ranks(ranks: list[int], hosts: list[str]) -> str:
    """rank 3 (node1), or ranks 8 to 15 (node1, node2)"""
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({where})"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]} ({where})"
    return f"ranks {', '.join(map(str, ranks))} ({where})"
