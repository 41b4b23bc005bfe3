"""FSDP's CPU collectives through shared memory, for ranks on one machine. gloo's TCP is slower (docs/lab).

A collective copies into a memory file that all ranks of its group have mapped, waits at a barrier, and copies or sums
from the file. Two halves alternate, so one barrier is enough: before a rank writes to a half again, it passes a barrier
that the others reach only after they have read that half.

    half 0, half 1:   slot of rank 0 | slot of rank 1 | ...      larger tensors are split into pieces
"""

import functools
import mmap
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from torchtitan_lite.cpu.barrier import Barrier
from torchtitan_lite.distributed.exchange import on_all, on_rank0

SLOT = 4 << 20  # bytes per rank in each half; 8 MiB is no faster


class SharedMemory:
    """Memory that the ranks of a group share.

    Raises:
        Exception: on every rank, if any rank can't map it.
    """

    def __init__(self, group: dist.ProcessGroup, slot: int = SLOT) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        around = slice(0, self.rank), slice(self.rank + 1, self.size)
        # two slices at most, so one or two copies reach all others
        self.others = [part for part in around if part.start < part.stop]
        self._turn = 0
        name = on_rank0(lambda: f"torchtitan_lite-{os.urandom(16).hex()}", group)

        def bind() -> None:
            self._barrier = Barrier(name, self.rank, self.size, self._require_others)

        def make() -> None:
            # unnamed: a kill leaves nothing behind, and the limit of /dev/shm does not apply
            file = os.memfd_create("torchtitan_lite")
            os.ftruncate(file, 2 * self.size * slot)
            self._barrier.share(file)
            os.close(file)

        def take() -> None:
            file = self._barrier.take()
            self._memory = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
            os.close(file)

        on_all(bind, group)
        on_rank0(make, group)
        on_all(take, group)

    def pieces(self, n: int, dtype: torch.dtype, slots: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """Cut n elements into pieces. Yields the range of each, and where to exchange it: (ranks, slots * elements)."""
        most = len(self._memory) // (2 * self.size * dtype.itemsize * slots)
        for start in range(0, n, most):
            stop = min(start + most, n)
            self._turn = 1 - self._turn
            half = self._memory.view(dtype).view(2, self.size, -1)[self._turn]
            yield slice(start, stop), half[:, : slots * (stop - start)]

    def barrier(self) -> None:
        """Wait for all ranks. Each can then read what the others wrote before.

        Raises:
            RuntimeError: a process of the group has ended, or did not arrive within the group's timeout.
        """
        self._barrier.wait()

    def _require_others(self, waited_s: float) -> None:
        """Raise the errors of `barrier`, with texts that lost.py recognises."""
        if ended := [rank for rank in range(self.size) if self._barrier.has_ended(rank)]:
            raise RuntimeError(f"Remote process exited: rank {self._global(ended)}")
        timeout_s = self.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        if waited_s >= timeout_s:
            late = self._global(self._barrier.absent())
            raise RuntimeError(f"Timed out waiting {1000 * timeout_s:.0f}ms at a barrier in shared memory: rank {late}")

    def _global(self, ranks: list[int]) -> str:
        return ", ".join(str(dist.get_global_rank(self.group, rank)) for rank in ranks)


def shared_memory_of(group: dist.ProcessGroup) -> SharedMemory | None:
    """Return a group's shared memory. If that fails, return None on all of its ranks, and warn on one."""
    try:
        return SharedMemory(group)
    except Exception as error:
        if dist.get_rank(group) == 0:
            warnings.warn(f"ranks can't share memory ({error}); using gloo over TCP, which is slower", stacklevel=2)
        return None


_of_neighbours = functools.cache(SharedMemory)  # for the groups of reshard_after_forward = N


class _Done:
    """The handle of a finished collective. If FSDP got None instead, it would keep more memory."""

    def wait(self) -> bool:
        return True


class _Collective:
    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate FSDP's buffers in ordinary memory."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Collective):
    """An all-gather for `set_custom_all_gather`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Copy rank r's input to row r of the output, on every rank."""
        is_ours = group.group_name == self._shared.group.group_name
        shared = self._shared if is_ours else _of_neighbours(group)
        own = input_tensor.view(torch.uint8)
        rows = output_tensor.view(torch.uint8).view(shared.size, -1)
        for piece, slots in shared.pieces(len(own), torch.uint8):
            slots[shared.rank] = own[piece]
            shared.barrier()
            for others in shared.others:
                rows[others, piece] = slots[others]
        if rows[shared.rank].data_ptr() != own.data_ptr():  # FSDP's input already is that row
            rows[shared.rank] = own
        return _Done() if async_op else None


class ReduceScatter(_Collective):
    """A reduce-scatter for `set_custom_reduce_scatter`. Sums in rank order, in the tensors' dtype."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write the sum of all inputs' rows r to rank r's output."""
        shared, n = self._shared, len(output_tensor)
        assert op == dist.ReduceOp.SUM, op
        assert group.size() == shared.size
        rows = input_tensor.view(shared.size, n)
        for piece, flat in shared.pieces(n, rows.dtype, shared.size):
            slots = flat.view(shared.size, shared.size, -1)
            for others in shared.others:
                slots[shared.rank, others] = rows[others, piece]
            shared.barrier()
            parts = [*slots[:, shared.rank]]
            parts[shared.rank] = rows[shared.rank, piece]
            _sum(parts, output_tensor[piece])


def all_reduce(shared: SharedMemory, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    """Sum a tensor over the group, in place, in rank order: the same bits on every rank."""
    assert op == dist.ReduceOp.SUM, op
    flat = tensor.view(-1)
    for piece, slots in shared.pieces(len(flat), flat.dtype):
        slots[shared.rank] = flat[piece]
        shared.barrier()
        _sum([*slots], flat[piece])


def _sum(parts: list[Tensor], out: Tensor) -> None:
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part


class _Replicas:
    """Replaces FSDP's dp_replicate group, so that its all-reduce, which has no setter, uses shared memory.

    It compares equal to the group, because torch looks up a group's backend when a collective raises.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shared.group, name)

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self._shared.group == other)

    def __hash__(self) -> int:
        return hash(self._shared.group)

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Done:
        for tensor in tensors:
            all_reduce(self._shared, tensor, options.reduceOp)
        return _Done()


def apply(model: nn.Module, mesh: DeviceMesh) -> None:
    """Use shared memory for a sharded model's collectives."""
    axes = [mesh.get_group(axis) for axis in range(mesh.ndim)]  # dp_shard, or dp_replicate and dp_shard
    *replicas, shards = [shared_memory_of(group) if group.size() > 1 else None for group in axes]
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if shards is not None:
        gather, reduce = AllGather(shards), ReduceScatter(shards)
        for module in sharded:
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # a protocol in all but name
            module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
    for shared in filter(None, replicas):
        for module in sharded:
            parameters: Any = module._get_fsdp_state()._fsdp_param_group
            if parameters is not None:  # torch has no set_custom_all_reduce
                parameters.mesh_info.replicate_process_group = _Replicas(shared)
