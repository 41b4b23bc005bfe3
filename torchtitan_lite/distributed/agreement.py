"""Python values that ranks exchange, the outcome of an action on rank 0, and equal configs and versions."""

import hashlib
import json
import platform
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_lite import __version__
from torchtitan_lite.config.schema import Config, flatten
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import BusyError, ConfigError

T = TypeVar("T")


def from_rank0(value: T | None, group: dist.ProcessGroup | None = None) -> T:
    """The Python value of the group's first rank, on every rank. The other ranks' argument is ignored."""
    is_source, source = dist.get_rank(group) == 0, dist.get_global_rank(group, 0) if group else 0
    mine = _to_bytes(value) if is_source else torch.empty(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([len(mine)], device="cpu")
    dist.broadcast(size, source, group)
    data = mine if is_source else torch.empty(int(size), dtype=torch.uint8, device="cpu")
    dist.broadcast(data, source, group)
    return _from_bytes(data)


def from_all_ranks(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The Python value of each rank of the group, on every rank."""
    mine = _to_bytes(value)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(mine)], device="cpu"), group)
    longest = max(int(size) for size in sizes)
    data = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in sizes]
    dist.all_gather(data, torch.cat([mine, mine.new_zeros(longest - len(mine))]), group)
    return [_from_bytes(each[: int(size)]) for each, size in zip(data, sizes, strict=True)]


# torch's own collectives of objects unpickle what arrives, which can run code; JSON can't. All of its objects are tags,
# {"tuple": [...]}, so that each value keeps its type.
_TAGGED: dict[str, Any] = {"tuple": tuple, "dict": dict, "path": Path}


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(_tagged(value)).encode()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    def untagged(content: dict[str, Any]) -> Any:
        ((tag, value),) = content.items()
        return _TAGGED[tag](value)

    return json.loads(data.numpy().tobytes(), object_hook=untagged)


def _tagged(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"dict": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_tagged(item) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Path):
        return {"path": str(value)}
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{type(value).__name__} can't be sent between ranks")


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
        ConfigError: on every rank, with each value that differs and the ranks and hosts that have it. On the ranks with
            the most common values it is a BusyError.
    """
    mine: dict[str, Any] = {
        "torchtitan_lite": __version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": world.device.type,
        **flatten(config),
    }
    # all values of all ranks only if they differ: with 16,384 ranks, these are 100 MB for each of them to read
    digest = hashlib.sha256(_to_bytes(mine).numpy().tobytes()).hexdigest()
    short = from_all_ranks((socket.gethostname(), digest))
    hosts = [host for host, _ in short]
    if all(other == digest for _, other in short):
        return list(dict.fromkeys(hosts))
    reports = from_all_ranks(mine)
    differences = []
    for key in sorted({key for values in reports for key in values}):
        ranks_of: dict[str, list[int]] = {}
        for rank, values in enumerate(reports):
            ranks_of.setdefault(repr(values.get(key)), []).append(rank)
        if len(ranks_of) > 1:
            shown = "; ".join(f"{value} on {_ranks(ranks, hosts)}" for value, ranks in ranks_of.items())
            differences.append(f"{key}: {shown}")
    digests = [other for _, other in short]
    # under a torchrun that starts again, only the machines with other values end, and the rest goes on without them
    error = BusyError if digest == max(digests, key=digests.count) else ConfigError
    raise error("\n  ".join(["the ranks differ in config or versions:", *differences]))


def _ranks(ranks: list[int], hosts: list[str]) -> str:
    """rank 3 (node1), or ranks 8 to 15 (node1, node2)"""
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
    if len(ranks) == 1:
        return f"rank {ranks[0]} ({where})"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]} ({where})"
    return f"ranks {', '.join(map(str, ranks))} ({where})"
