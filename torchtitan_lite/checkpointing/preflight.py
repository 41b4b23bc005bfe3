"""Checks before a save: NaN, infinity and diverged copies must not reach a checkpoint."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.distributed.process_group import sum_over_ranks
from torchtitan_lite.distributed.sharding import local_rows, optimizer_tensors, own_tensors
from torchtitan_lite.errors import DivergedError, NonFiniteError
from torchtitan_lite.terminal import counted


def require_finite(model: nn.Module, step: int) -> None:
    """Raise NonFiniteError on every rank if a parameter is not finite on any."""
    finite = [local_rows(parameter)[0].isfinite().all() for parameter in model.parameters()]
    bad = (~torch.stack(finite)).float()
    if sum_over_ranks(bad).any():
        names = [name for (name, _), flag in zip(model.named_parameters(), bad.tolist(), strict=True) if flag]
        raise NonFiniteError(
            f"step {step}: not finite: {counted(len(names), 'parameter')}, the first is {names[0]}. Nothing was saved. "
            "Older checkpoints are untouched; a lower optim.lr may help"
        )


def require_equal_copies(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """With HSDP, compare the copies of parameters and optimizer state bit for bit. A checkpoint saves only one copy.

    Raises:
        DivergedError: on every rank, with the tensors, and the ranks whose copies differ from the first.
    """
    first_parameter = next(model.parameters())
    mesh = first_parameter.device_mesh if isinstance(first_parameter, DTensor) else None
    if mesh is None or "dp_replicate" not in (mesh.mesh_dim_names or ()):
        return
    content = own_tensors(model) | optimizer_tensors(model, optimizer)
    tensors = {name: local_rows(tensor)[0] for name, tensor in content.items() if tensor.ndim}
    # one flipped bit changes the sum of the bit patterns
    sums = torch.stack([_bits(rows).sum() for rows in tensors.values()])
    first = sums.clone()
    group = mesh.get_group("dp_replicate")
    dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)
    differs = (sums != first).float()
    ranks = torch.zeros(dist.get_world_size(), device=differs.device)
    ranks[dist.get_rank()] = differs.any().float()
    if sum_over_ranks(ranks).any():
        sum_over_ranks(differs)
        names = [name for name, bad in zip(tensors, differs.tolist(), strict=True) if bad]
        raise DivergedError(
            f"step {step}: copies of the model differ: rank {', '.join(str(r) for r, bad in enumerate(ranks) if bad)} "
            f"against the first copy, in {counted(len(names), 'tensor')}, the first is {names[0]}. A bit flipped in "
            "memory, or the ranks diverged. Nothing was saved; the same command resumes from the newest checkpoint"
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
