"""Evaluation and generation with sharded parameters. Between tokens they stay gathered, if they fit."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_lite.config.schema import FsdpConfig
from torchtitan_lite.distributed.fsdp import groups_of
from torchtitan_lite.models import Transformer

GATHERED_BYTES = 1 << 30  # limit on a CPU, where all ranks share the memory


@contextlib.contextmanager
def evaluating(model: nn.Module, *, compiled: bool = False) -> Iterator[None]:
    """Switch to evaluation mode; afterwards, back to training mode with resharded parameters.

    Args:
        compiled: use compiled blocks, which recompile for each length.
    """
    model.eval()
    with contextlib.nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        yield
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextlib.contextmanager
def generating(model: Transformer, config: FsdpConfig, device: torch.device) -> Iterator[None]:
    """Enter `evaluating`; parameters stay gathered after the first forward, if they fit. Collective."""
    with evaluating(model):
        kept = _kept_gathered(model, config, device)
        for group, _ in kept:
            group.set_reshard_after_forward(False, recurse=False)
        yield
        for group, reshards in kept:
            group.set_reshard_after_forward(reshards, recurse=False)


def _kept_gathered(model: Transformer, config: FsdpConfig, device: torch.device) -> list[tuple[FSDPModule, bool]]:
    """Return the groups to keep gathered, each with its reshard_after_forward; empty unless all fit."""
    if config.cpu_offload or type(config.reshard_after_forward) is int:
        return []  # offloaded parameters must not stay on the GPU; torch's setter takes no integer
    groups = groups_of(model, config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    needed = sum(sizes[name] * group.param_dtype.itemsize for group in groups for name in group.parameters)
    room = GATHERED_BYTES
    if device.type == "cuda":  # half of the memory that is free or cached by torch: generation needs some too
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        room = (torch.cuda.mem_get_info(device)[0] + cached) // 2
    fits = torch.tensor(needed <= room, dtype=torch.int64, device=device)
    dist.all_reduce(fits, dist.ReduceOp.MIN)  # all ranks gather, or none
    if not fits.item():
        return []
    first = [(group.modules[0], bool(group.reshard_after_forward)) for group in groups]
    return [(module, reshards) for module, reshards in first if isinstance(module, FSDPModule)]
