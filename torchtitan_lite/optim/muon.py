"""Muon (Jordan et al., 2024) for sharded matrices: momentum, orthogonalised by a Newton-Schulz iteration.

The iteration needs whole matrices, but a rank has only parts. So each matrix has an owner, such that owners have about
equally much to compute. An all-to-all sends the parts of matrices of all shapes to their owners, each owner
orthogonalises its matrices, and a second all-to-all returns the parts. With HSDP, each replica handles a share of the
matrices, and an all-gather between replicas exchanges the results. For N parameters on k replicas of R ranks, a rank
sends about 2 N / (k R) elements, and with several replicas another N / R.

On a CPU an owner computes one matrix at a time, so updates are the same on any number of ranks, bit for bit. On a GPU
it batches its matrices of one shape, which launches fewer kernels, but whose matmuls may round differently.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.distributed.sharding import own_part, shard_dim, shard_range
from torchtitan_lite.optim.guarded import AdamW

ITERATIONS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315  # singular values end between 0.7 and 1.2 (Jordan)
OWNED_BYTES = 64 << 20  # per owner and exchange, but at least one matrix; a step's peak is a few times this


class Muon(AdamW):
    """Muon for groups with `muon` (matrices of the blocks, see groups.py), fused AdamW for the others.

    A matrix's state is `momentum_buffer`, a DTensor like the parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig) -> None:
        super().__init__(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        self.momentum = config.muon_momentum

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # Adam's expects a step count for every parameter

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        return not group["muon"] and super()._init_group(group, *lists)  # AdamW's step skips the matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        super().step(closure)
        muon = (group for group in self.param_groups if group["muon"])
        groups = {p: group for group in muon for p in group["params"] if p.grad is not None}
        for matrices in exchanges(groups):
            self._update({matrix: groups[matrix] for matrix in matrices})

    def _update(self, groups: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Update the matrices of one exchange, each with the learning rate and weight decay of its group."""
        matrices = list(groups)
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        weights = [own_part(matrix)[0] for matrix in matrices]
        momenta = [own_part(self.state[matrix]["momentum_buffer"])[0] for matrix in matrices]
        gradients: Any = [own_part(matrix.grad)[0] for matrix in matrices]  # type: ignore[arg-type]
        gradients = torch._foreach_div(gradients, 1.0 if self.grad_scale is None else self.grad_scale)
        # not lerp: it rounds the last elements of a shard differently
        torch._foreach_mul_(gradients, 1 - self.momentum)
        updates = list(torch._foreach_mul(momenta, self.momentum))
        torch._foreach_add_(updates, gradients)
        self._write(momenta, updates)
        torch._foreach_mul_(updates, self.momentum)  # Nesterov's momentum
        torch._foreach_add_(updates, gradients)
        orthogonalise(matrices, updates)
        # 0.2 sqrt(max(M, N)) gives an orthogonal update the size of AdamW's (Moonlight, 2025)
        torch._foreach_mul_(updates, [0.2 * max(matrix.shape[-2:]) ** 0.5 for matrix in matrices])
        torch._foreach_add_(updates, torch._foreach_mul(weights, [group["weight_decay"] for group in groups.values()]))
        torch._foreach_mul_(updates, [group["lr"] for group in groups.values()])
        if self.update_norms is not None:
            self.update_norms.update(zip(matrices, torch._foreach_norm(updates), strict=True))
        self._write(weights, torch._foreach_sub(weights, updates))

    def _write(self, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Overwrite tensors, unless the update is withheld."""
        withheld = tensors[0].new_zeros(()) if self.found_inf is None else self.found_inf
        for tensor, value in zip(tensors, values, strict=True):
            torch.where(withheld != 0, tensor, value, out=tensor)


def dtype_of_iteration(*, on_gpu: bool) -> torch.dtype:
    """Return the dtype of the iteration's matmuls, and of the rows that ranks exchange."""
    return torch.bfloat16 if on_gpu else torch.float32


def cost(rows: int, columns: int) -> int:
    """Return the multiplications of the iteration, up to a factor."""
    short, long = sorted((rows, columns))
    return short * short * (2 * long + short)


def exchanges(matrices: Iterable[nn.Parameter], n_owners: int = 0) -> Iterator[list[nn.Parameter]]:
    """Group matrices to exchange together, the costly ones first.

    Args:
        n_owners: each gets about OWNED_BYTES, or as much as the largest matrix has; default: all ranks of the mesh.
    """
    ordered = sorted(matrices, key=lambda matrix: cost(*matrix.shape[-2:]), reverse=True)
    n_owners = n_owners or math.prod(ranks_of(m, of_replicas=r)[1] for m in ordered[:1] for r in (False, True))
    room = n_owners * max(OWNED_BYTES, *(4 * matrix.numel() for matrix in ordered), 0)
    ends = itertools.accumulate(4 * matrix.numel() for matrix in ordered)
    for _, exchanged in itertools.groupby(zip(ends, ordered, strict=True), lambda pair: (pair[0] - 1) // room):
        yield [matrix for _, matrix in exchanged]


def balanced(costs: Iterable[int], n_owners: int) -> list[list[int]]:
    """Return the numbers of each owner's matrices. Each matrix in turn goes to an owner with the least to compute."""
    owned, loads = [list[int]() for _ in range(n_owners)], [(0, owner) for owner in range(n_owners)]
    for i, n in enumerate(costs):
        load, owner = loads[0]
        owned[owner].append(i)
        heapq.heapreplace(loads, (load + n, owner))
    return owned


def ranks_of(matrix: Tensor, *, of_replicas: bool = False) -> tuple[Any, int, int]:
    """Return the process group that shards a matrix, its size, and this rank in it; None, 1, 0 if not sharded.

    Args:
        of_replicas: return the group of ranks with the same shard, one per replica, instead.
    """
    if isinstance(matrix, DTensor):
        for axis, placement in enumerate(matrix.placements):
            if placement.is_shard() != of_replicas and matrix.device_mesh.size(axis) > 1:
                group = matrix.device_mesh.get_group(axis)
                return group, dist.get_world_size(group), dist.get_rank(group)
    return None, 1, 0


class Split(NamedTuple):
    """A matrix whose rows, or those of its transpose, are split over ranks."""

    rows: Tensor  # this rank's
    size: int  # rows of the whole
    transposed: bool


def orthogonalise(matrices: list[nn.Parameter], parts: list[Tensor]) -> None:
    """Orthogonalise matrices, and each matrix of stacks (E, M, N) such as a layer's experts, in place.

    Unless a stack is split at dim 1, each rank has whole matrices and needs no exchange. (Every replica computes all.)
    Owner k of the others is rank k // replicas of replica k % replicas: with 2 replicas of 2 ranks, the owners are
    (replica 0, rank 0), (1, 0), (0, 1), (1, 1).

    Args:
        parts: this rank's parts of the values to orthogonalise.
    """
    split, whole = list[Split](), list[Tensor]()
    for matrix, part in zip(matrices, parts, strict=True):
        each = part.unbind() if part.ndim == 3 else [part]
        dim = shard_dim(matrix) - matrix.ndim + 2
        if dim < 0:
            whole += each
        else:
            split += [Split(one.T if dim else one, matrix.shape[shard_dim(matrix)], dim == 1) for one in each]
    _orthogonalise_whole(whole)
    (shards, n_ranks, rank), (group, n, replica) = (ranks_of(matrices[0], of_replicas=r) for r in (False, True))
    costs = (cost(m.size, m.rows.shape[1]) for m in split)
    by_owner = [[split[i] for i in owned] for owned in balanced(costs, n * n_ranks)]
    by_replica = [[m.rows for of_owner in by_owner[r::n] for m in of_owner] for r in range(n)]
    if shards is None:
        _orthogonalise_whole(by_replica[replica])
    elif by_replica[replica]:
        _within_replica(by_owner[replica::n], shards, rank)
    if n > 1 and (most := max(sum(part.numel() for part in of_one) for of_one in by_replica)):
        sent = parts[0].new_zeros(most, dtype=dtype_of_iteration(on_gpu=parts[0].is_cuda))
        _copy(_cut(sent, map(Tensor.size, by_replica[replica])), by_replica[replica])
        received = sent.new_empty(n, most)
        dist.all_gather(list(received), sent, group=group)
        for of_one, values in zip(by_replica, received, strict=True):
            _copy(of_one, _cut(values, map(Tensor.size, of_one)))


def _within_replica(by_owner: list[list[Split]], group: dist.ProcessGroup, rank: int) -> None:
    """Orthogonalise the matrices of each rank of a replica. Ranks exchange equally many rows, so the last ones pad."""
    n_ranks, split, own = len(by_owner), list(itertools.chain(*by_owner)), by_owner[rank]
    rooms = [[len(shard_range(m.size, n_ranks, 0)) * m.rows.shape[1] for m in of_one] for of_one in by_owner]
    to_owners = list(map(sum, rooms))
    rows = [m.rows for m in split]
    sent = rows[0].new_zeros(sum(to_owners), dtype=dtype_of_iteration(on_gpu=rows[0].is_cuda))
    pieces = sent.split(list(itertools.chain(*rooms)))
    places = [piece.view(-1, each.shape[1])[: len(each)] for piece, each in zip(pieces, rows, strict=True)]
    _copy(places, rows)
    received = sent.new_empty(n_ranks, to_owners[rank])
    from_ranks = [to_owners[rank]] * n_ranks
    dist.all_to_all_single(received.view(-1), sent, from_ranks, to_owners, group=group)
    columns = received.split(rooms[rank], 1)
    padded = [column.reshape(-1, m.rows.shape[1]) for column, m in zip(columns, own, strict=True)]
    tables = [each[: m.size] for each, m in zip(padded, own, strict=True)]
    wholes = [(table.T if m.transposed else table).contiguous() for table, m in zip(tables, own, strict=True)]
    _orthogonalise_whole(wholes)
    _copy(tables, [whole.T if m.transposed else whole for whole, m in zip(wholes, own, strict=True)])
    _copy(list(columns), [each.view(n_ranks, -1) for each in padded])
    dist.all_to_all_single(sent, received.view(-1), to_owners, from_ranks, group=group)
    _copy(rows, places)


def _cut(flat: Tensor, shapes: Iterable[Sequence[int]]) -> list[Tensor]:
    """Cut a flat tensor, or its first elements, into tensors of these shapes."""
    shapes = [*shapes]
    sizes = [*map(math.prod, shapes)]
    return [piece.view(shape) for piece, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


def _copy(to: list[Tensor], values: list[Tensor] | tuple[Tensor, ...]) -> None:
    if to:  # torch refuses empty lists
        torch._foreach_copy_(to, values)


def _orthogonalise_whole(matrices: Sequence[Tensor]) -> None:
    """Orthogonalise whole matrices (M, N) in place: on a GPU those of one shape as a batch, on a CPU one by one."""
    shapes: dict[Any, list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        if matrix.is_cuda:
            shapes[matrix.shape].append(matrix)
        else:
            matrix.copy_(newton_schulz(matrix.to(dtype_of_iteration(on_gpu=False))))
    for same in shapes.values():
        batch = torch.stack(same).to(dtype_of_iteration(on_gpu=True))
        torch._foreach_copy_(same, list(newton_schulz(batch)))


def newton_schulz(x: Tensor) -> Tensor:
    """Return matrices with the singular vectors of x, (M, N) or (B, M, N), and singular values near 1."""
    a, b, c = COEFFICIENTS
    add = torch.baddbmm if x.ndim == 3 else torch.addmm
    x = x.view(x.shape)  # usual strides for a transposed matrix of one row: strides affect a matmul's rounding
    wide = x.shape[-2] <= x.shape[-1]
    x = (x if wide else x.mT).contiguous()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = add(x, add(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT.contiguous()
