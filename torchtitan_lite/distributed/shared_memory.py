"""FSDP's CPU collectives through shared memory, for ranks on one machine. gloo's TCP is slower (BENCHMARKS.md).

A collective copies into a memory file that all ranks have mapped, waits at a gloo barrier (which notices a lost rank),
and copies or sums out of it. Two halves alternate, so one barrier is enough: before a rank writes to a half again, it
passes a barrier that the others reach only after they have read that half.

    half 0, half 1:   slot of rank 0 | slot of rank 1 | ...      larger tensors go through in pieces
"""

import mmap
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from torchtitan_lite.distributed.process_group import env_int, from_rank0

SLOT = 8 << 20  # bytes per rank in each half
_DONE = object()  # a finished asynchronous collective; for None FSDP would keep more memory
# named differently before torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SharedMemory:
    """The memory that the ranks of a group share.

    Raises:
        OSError: on every rank, if any rank can't map it.
    """

    def __init__(self, group: dist.ProcessGroup, slot: int = SLOT) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._turn = 0
        n_bytes, descriptor, error = 2 * self.size * slot, -1, ""
        place: tuple[str, tuple[int, int]] = "", (0, 0)
        if self.rank == 0:
            try:
                # unnamed: a kill leaves nothing behind, and the limit of /dev/shm does not apply
                descriptor = os.memfd_create("torchtitan_lite")
                os.ftruncate(descriptor, n_bytes)
                place = f"/proc/{os.getpid()}/fd/{descriptor}", _identity(descriptor)
            except (OSError, AttributeError) as caught:
                error = str(caught)
        place = from_rank0(place, group)
        try:
            if self.rank != 0:
                path, identity = place
                descriptor = os.open(path, os.O_RDWR)
                if _identity(descriptor) != identity:  # ranks may be in different PID namespaces
                    raise OSError(f"{path} is another file for rank {self.rank}")
            self._memory = torch.frombuffer(mmap.mmap(descriptor, n_bytes), dtype=torch.uint8)
        except (OSError, ValueError) as caught:
            error = error or str(caught)
        errors: list[Any] = [None] * self.size
        dist.all_gather_object(errors, error, group=group)
        if descriptor >= 0:
            os.close(descriptor)  # the mapping stays
        if any(errors):
            raise OSError(next(text for text in errors if text))

    def half(self, dtype: torch.dtype) -> Tensor:
        """The half to use next, (ranks, elements)."""
        self._turn = 1 - self._turn
        return self._memory.view(dtype).view(2, self.size, -1)[self._turn]

    def barrier(self) -> None:
        """After it, every rank can read what the others wrote before it."""
        dist.barrier(group=self.group)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class _Collective:
    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP's buffers stay in ordinary memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Collective):
    """For `set_custom_all_gather`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Rank r's input becomes row r of the output, on every rank."""
        shared = self._shared
        if group.size() != shared.size:  # with reshard_after_forward = N
            return _all_gather(output_tensor, input_tensor, group, async_op)
        mine = input_tensor.view(torch.uint8)
        rows = output_tensor.view(torch.uint8).view(shared.size, -1)
        start = 0
        while start < len(mine):
            half = shared.half(torch.uint8)
            stop = min(start + half.shape[1], len(mine))
            half[shared.rank, : stop - start] = mine[start:stop]
            shared.barrier()
            for rank in range(shared.size):
                if rank != shared.rank:
                    rows[rank, start:stop] = half[rank, : stop - start]
            start = stop
        if rows[shared.rank].data_ptr() != mine.data_ptr():  # in FSDP, the input already is that row
            rows[shared.rank] = mine
        return _DONE if async_op else None


class ReduceScatter(_Collective):
    """For `set_custom_reduce_scatter`. Sums in rank order, in the tensors' dtype."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Rank r gets the sum of row r of all inputs."""
        shared, n = self._shared, len(output_tensor)
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        assert group.size() == shared.size
        rows = input_tensor.view(shared.size, n)
        start = 0
        while start < n:
            half = shared.half(rows.dtype)
            stop = min(start + half.shape[1] // shared.size, n)
            slots = half[:, : shared.size * (stop - start)].view(shared.size, shared.size, stop - start)
            for rank in range(shared.size):
                if rank != shared.rank:
                    slots[shared.rank, rank] = rows[rank, start:stop]
            shared.barrier()
            parts = [slots[rank, shared.rank] for rank in range(shared.size)]
            parts[shared.rank] = rows[shared.rank, start:stop]
            total = torch.add(parts[0], parts[1], out=output_tensor[start:stop])
            for part in parts[2:]:
                total += part
            start = stop
        if op == dist.ReduceOp.AVG:
            output_tensor /= shared.size


def apply_shared_memory(model: nn.Module, mesh: DeviceMesh) -> None:
    """Use shared memory for a sharded model's collectives, if all ranks are on the CPU of one machine."""
    group = mesh.get_group(mesh.ndim - 1)  # dp_shard; with HSDP gloo sums over dp_replicate
    one_machine = env_int("LOCAL_WORLD_SIZE", 1) == dist.get_world_size()
    if mesh.device_type != "cpu" or not one_machine or group.size() == 1:
        return
    try:
        shared = SharedMemory(group)
    except OSError as error:
        if dist.get_rank(group) == 0:
            warnings.warn(f"ranks can't share memory ({error}); using gloo over TCP, which is slower", stacklevel=2)
        return
    gather, reduce = AllGather(shared), ReduceScatter(shared)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # a protocol in all but name
            module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
