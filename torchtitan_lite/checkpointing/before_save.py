"""Checks before a save: all parameters are finite, and all HSDP replicas are equal."""

import functools
import socket

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.checkpointing.tensor_names import model_tensors, optimizer_tensors
from torchtitan_lite.distributed.exchange import values_of_ranks
from torchtitan_lite.distributed.process_group import sum_over_ranks
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.errors import NonFiniteError, ReplicaMismatchError
from torchtitan_lite.terminal import counted

CHUNK_ELEMENTS = 1 << 20  # that a digest processes at a time: 8 MiB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by size of an element


def require_finite(model: nn.Module, step: int) -> None:
    """Raise NonFiniteError on every rank if a parameter is not finite on any rank."""
    finite = [own_part(parameter)[0].isfinite().all() for parameter in model.parameters()]
    bad = (~torch.stack(finite)).float()
    if sum_over_ranks(bad).any():
        names = [name for (name, _), flag in zip(model.named_parameters(), bad.tolist(), strict=True) if flag]
        raise NonFiniteError(
            f"step {step}: not finite: {counted(len(names), 'parameter')}, the first is {names[0]}. Nothing was saved. "
            "Older checkpoints are untouched; a lower optim.lr may help"
        )


def require_equal_replicas(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """With HSDP, compare the replicas' parameters and optimizer state, because a checkpoint saves only one replica.

    Each rank compares a digest of each tensor, one integer, with the first replica's. Collective.

    Raises:
        ReplicaMismatchError: on every rank, with the tensors and ranks that differ from the first replica.
    """
    parameter = next(model.parameters())
    if not isinstance(parameter, DTensor) or "dp_replicate" not in (parameter.device_mesh.mesh_dim_names or ()):
        return
    group = parameter.device_mesh.get_group("dp_replicate")
    tensors = model_tensors(model) | optimizer_tensors(model, optimizer)
    digests = [digest(own_part(tensor)[0]) for tensor in tensors.values()]
    own = torch.stack([one.to(digests[0].device) for one in digests])
    first = own.clone()
    dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)
    differs = (own != first).float()
    ranks = torch.zeros(dist.get_world_size(), device=differs.device)
    ranks[dist.get_rank()] = differs.any().float()
    if not sum_over_ranks(ranks).any():
        return
    bad = [name for name, count in zip(tensors, sum_over_ranks(differs).tolist(), strict=True) if count]
    hosts = values_of_ranks(socket.gethostname())
    where = ", ".join(f"{rank} ({hosts[rank]})" for rank, flag in enumerate(ranks.tolist()) if flag)
    raise ReplicaMismatchError(
        f"step {step}: replicas of the model differ: rank {where} from the first replica, in "
        f"{counted(len(bad), 'tensor')}, the first is {bad[0]}. A bit flipped in memory, or the ranks diverged. "
        "Nothing was saved; the same command resumes from the newest checkpoint"
    )


def digest(tensor: Tensor) -> Tensor:
    """Return () int64: the sum, modulo 2^64, of each element's bits as an integer times an odd weight of its position.

    A flipped bit always changes the digest. So do two flips within a chunk, and swapping two elements of it: such sums
    have less than 64 bits, and 2^k w = 2^m v has no solution for different k and m, or for different odd w and v.
    """
    bits = tensor.detach().contiguous().flatten().view(_BITS[tensor.element_size()])
    weights = odd_numbers(CHUNK_ELEMENTS, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in bits.split(CHUNK_ELEMENTS):
        total = 0x5851F42D4C957F2D * total + (chunk * weights[: len(chunk)]).sum()  # Knuth's multiplier
    return total


@functools.cache
def odd_numbers(n: int, device: torch.device) -> Tensor:
    """Return the first n odd numbers, (n,) int64. Cached, because computing them takes as long as a digest."""
    return torch.arange(1, 2 * n, 2, device=device)
