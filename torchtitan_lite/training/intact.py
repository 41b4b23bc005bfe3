"""What must not reach an update or a checkpoint: values that are not finite, copies that differ, flipped bits.

Memory is compared by digests, one integer for each tensor. Between two updates nothing writes to parameters and
optimizer state. So digests that differ, after one update and before the next, come from a fault of the memory.
"""

import functools
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from torchtitan_lite.checkpointing.tensor_names import Tensors, optimizer_tensors, own_tensors
from torchtitan_lite.distributed.agreement import from_all_ranks
from torchtitan_lite.distributed.process_group import sum_over_ranks
from torchtitan_lite.distributed.sharding import local_rows
from torchtitan_lite.errors import DivergedError, MemoryFaultError, NonFiniteError
from torchtitan_lite.terminal import counted
from torchtitan_lite.training.session import Session, StepResult

PIECE = 1 << 20  # elements whose products with weights are in memory at a time: 8 MiB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by size of an element


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
    """With HSDP, compare the copies of parameters and optimizer state. A checkpoint saves only one copy.

    Raises:
        DivergedError: on every rank, with the tensors, and the ranks whose copies differ from the first.
    """
    if copies_group(model) is not None:
        tensors = rows_of(model, optimizer)
        compare_copies(model, list(tensors), digests(tensors), step)


def copies_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that hold copies of this rank's shards; None without HSDP."""
    first = next(model.parameters())
    if not isinstance(first, DTensor) or "dp_replicate" not in (first.device_mesh.mesh_dim_names or ()):
        return None
    return first.device_mesh.get_group("dp_replicate")


def rows_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """This rank's part of everything that a checkpoint has, by name."""
    content = own_tensors(model) | optimizer_tensors(model, optimizer)
    return {name: local_rows(tensor)[0] for name, tensor in content.items()}


def digests(tensors: Tensors) -> Tensor:
    """The digest of each tensor, (len(tensors),) int64, on the device of the first one."""
    found = [digest(tensor) for tensor in tensors.values()]
    return torch.stack([one.to(found[0].device) for one in found])


def digest(tensor: Tensor) -> Tensor:
    """() int64: the bits of each element, as an integer, times an odd weight of its place, summed modulo 2^64.

    A flipped bit always changes it. So do two among PIECE elements, and an exchange of two of them: such sums have less
    than 64 bits, and 2^k w = 2^m v has no solution for other k and m, or for other odd w and v.
    """
    bits = tensor.detach().contiguous().flatten().view(_BITS[tensor.element_size()])
    weights = odd_numbers(PIECE, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in bits.split(PIECE):
        total = 0x5851F42D4C957F2D * total + (piece * weights[: len(piece)]).sum()  # Knuth's multiplier
    return total


@functools.cache
def odd_numbers(n: int, device: torch.device) -> Tensor:
    """The first n of them, (n,) int64: making them takes as long as a digest."""
    return torch.arange(1, 2 * n, 2, device=device)


def compare_copies(model: nn.Module, names: Sequence[str], mine: Tensor, step: int) -> None:
    """`require_equal_copies`, from digests. Collective.

    Args:
        mine: the digest of this rank's part of each named tensor.
    """
    group = copies_group(model)
    if group is None:
        return
    first = mine.clone()
    dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)
    if found := _differences(names, mine != first):
        raise DivergedError(
            f"step {step}: copies of the model differ: {found[0]} against the first copy, in {found[1]}. A bit flipped "
            "in memory, or the ranks diverged. Nothing was saved; the same command resumes from the newest checkpoint"
        )


def _differences(names: Sequence[str], differs: Tensor) -> tuple[str, str] | None:
    """The ranks with a difference and their machines, and the tensors, if there is one on any rank. Collective.

    Args:
        differs: (len(names),) bool, of this rank.
    """
    ranks = torch.zeros(dist.get_world_size(), device=differs.device)
    ranks[dist.get_rank()] = differs.any().float()
    if not sum_over_ranks(ranks).any():
        return None
    counts = sum_over_ranks(differs.float())
    bad = [name for name, count in zip(names, counts.tolist(), strict=True) if count]
    hosts = from_all_ranks(socket.gethostname())
    where = ", ".join(f"{rank} ({hosts[rank]})" for rank, flag in enumerate(ranks.tolist()) if flag)
    return f"rank {where}", f"{counted(len(bad), 'tensor')}, the first is {bad[0]}"


class MemoryCheck:
    """`spike.memory_check_every`: digests after an update, and again before the next one and in a save.

    With HSDP, those of what is saved are also compared between copies before the next update. That finds flips between
    earlier updates, and updates that were computed wrong.
    """

    def __init__(self) -> None:
        # after which step, what, its digests, and how many of them are in a checkpoint
        self._taken: tuple[int, Tensors, Tensor, int] | None = None
        self._hook: RemovableHandle | None = None

    def take(self, s: Session, _: StepResult | None = None) -> None:
        """Keep the digests of this moment, to compare at the next update."""
        self._hook = self._hook or s.optimizer.register_step_pre_hook(lambda *_: self._before_update(s.model))
        saved = rows_of(s.model, s.optimizer)
        others = {name: buffer for name, buffer in s.model.named_buffers() if name not in saved}
        self._taken = s.state.step, saved | others, digests(saved | others), len(saved)

    def changed(self) -> str:
        """What has changed since the digests were taken, and on which machines; "" if nothing has. Collective.

        A save calls it after it has read the tensors, and before it commits them.
        """
        if self._taken is None:
            return ""
        _, tensors, before, _ = self._taken
        found = _differences(list(tensors), digests(tensors) != before)
        return f"after its update, memory changed by itself: {found[0]}, in {found[1]}" if found else ""

    def _before_update(self, model: nn.Module) -> None:
        """A load updates, too, before it writes (checkpoint.py): so no digest outlasts a rewind.

        Raises:
            MemoryFaultError, DivergedError: on every rank, with the ranks, their machines and the tensors.
        """
        if self._taken is None:
            return
        step, tensors, before, saved = self._taken
        if changed := self.changed():
            raise MemoryFaultError(
                f"step {step}: {changed}. No update and no checkpoint used it. The same command resumes from the "
                "newest checkpoint. If that machine is named again, leave it out"
            )
        # not what each host computes for itself, such as rotary tables, where the last bit depends on its processor
        compare_copies(model, list(tensors)[:saved], before[:saved], step)
        self._taken = None
