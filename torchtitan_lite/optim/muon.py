"""Muon (Jordan et al., 2024) for sharded matrices: momentum, orthogonalised by a Newton-Schulz iteration.

The iteration needs whole matrices, but a rank has only rows. So each matrix has an owner. An all-to-all sends the rows
of many matrices to their owners, each owner orthogonalises its matrices, and a second all-to-all returns the rows. With
HSDP, each replica handles a share of the matrices, and an all-gather between replicas exchanges the results. If there
are at least as many matrices as ranks, a rank computes 1 / world size of the matmuls. For N parameters on k
replicas of R ranks, a rank sends about 2 N / (k R) elements, and with several replicas another N / R.

In a stack of matrices (E, M, N), such as a layer's experts, each rank has whole matrices unless the stack is split at
dim 1. A rank orthogonalises its whole matrices without an exchange. (Every replica computes all of them.)

On a CPU an owner computes one matrix at a time, from contiguous copies of the same rows. So updates are the same on any
number of ranks, bit for bit. On a GPU an owner batches its matrices of one shape, which launches fewer kernels. Their
matmuls may then round differently on a different number of ranks; everything else is the same bit for bit.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.distributed.sharding import own_part, shard_dim
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

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        every = self.param_groups
        try:
            self.param_groups = [group for group in every if not group["muon"]]
            super().step(closure)
        finally:
            self.param_groups = every
        first = 0  # the next matrix's owner; owners take turns across shapes
        for group in every:
            if group["muon"]:
                for matrices in exchanges(p for p in group["params"] if p.grad is not None):
                    self._update(matrices, first, group["lr"], group["weight_decay"])
                    first += len(matrices)

    def _update(self, matrices: list[nn.Parameter], first: int, lr: float, weight_decay: float) -> None:
        """Update matrices of one shape; `first`: see `orthogonalised`."""
        withheld = None if self.found_inf is None else self.found_inf != 0
        directions = self._directions(matrices, withheld)
        # 0.2 sqrt(max(M, N)) gives an orthogonal update the size of AdamW's (Moonlight, 2025)
        scale = 0.2 * max(matrices[0].shape[-2:]) ** 0.5
        weights = [own_part(matrix)[0] for matrix in matrices]
        orthogonalise = orthogonalised if matrices[0].ndim == 2 else orthogonalised_stacks
        updates = _cast(orthogonalise(matrices, directions, first), weights[0].dtype)
        torch._foreach_mul_(updates, scale)
        torch._foreach_add_(updates, torch._foreach_mul(weights, weight_decay))
        torch._foreach_mul_(updates, lr)
        if withheld is None:
            torch._foreach_sub_(weights, updates)
        else:
            _write_unless(withheld, weights, torch._foreach_sub(weights, updates))

    def _directions(self, matrices: list[nn.Parameter], withheld: Tensor | None) -> list[Tensor]:
        """Return this rank's rows of Nesterov's momentum, in the dtype of the iteration."""
        gradients: Any = [own_part(matrix.grad)[0] for matrix in matrices]  # type: ignore[arg-type]
        if self.grad_scale is not None:
            gradients = torch._foreach_div(gradients, self.grad_scale)
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        buffers = [own_part(self.state[matrix]["momentum_buffer"])[0] for matrix in matrices]
        # not lerp: it rounds the last elements of a shard differently
        gradients = torch._foreach_mul(gradients, 1 - self.momentum)
        if withheld is None:
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, gradients)
            directions = torch._foreach_mul(buffers, self.momentum)
        else:
            momenta = torch._foreach_mul(buffers, self.momentum)
            torch._foreach_add_(momenta, gradients)
            _write_unless(withheld, buffers, momenta)
            directions = torch._foreach_mul(momenta, self.momentum)
        torch._foreach_add_(directions, gradients)
        return _cast(directions, dtype_of_iteration(on_gpu=matrices[0].is_cuda))


def dtype_of_iteration(*, on_gpu: bool) -> torch.dtype:
    """Return the dtype of the iteration's matmuls, and of the rows that ranks exchange."""
    return torch.bfloat16 if on_gpu else torch.float32


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Cast tensors of one shape, in one kernel."""
    if tensors[0].dtype == dtype:
        return list(tensors)
    cast = list(tensors[0].new_empty(len(tensors), *tensors[0].shape, dtype=dtype))
    torch._foreach_copy_(cast, list(tensors))
    return cast


def _write_unless(withheld: Tensor, tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        torch.where(withheld, tensor, value, out=tensor)


def exchanges(matrices: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Group matrices to exchange together: one shape, one sharding, at most OWNED_BYTES per owner."""
    shapes: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for matrix in matrices:
        shapes[tuple(matrix.shape), shard_dim(matrix)].append(matrix)
    for same in shapes.values():
        owners = ranks_of(same[0])[1] * ranks_of(same[0], of_replicas=True)[1]
        n = max(OWNED_BYTES // (same[0].numel() * 4), 1) * owners
        yield from (same[i : i + n] for i in range(0, len(same), n))


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


def orthogonalised_stacks(stacks: list[nn.Parameter], parts: list[Tensor], first: int) -> list[Tensor]:
    """Orthogonalise each matrix of stacks (E, M, N). Returns this rank's part of each stack."""
    each = [matrix for part in parts for matrix in part.unbind(0)]
    if shard_dim(stacks[0]) > 0:  # this rank has some rows or columns of each matrix
        each = orthogonalised([stack for stack in stacks for _ in range(len(stack))], each, first)
    elif each:
        each = _each(torch.cat(parts)) if parts[0].is_cuda else _each(each)
    return list(torch.stack(each).split([len(part) for part in parts])) if each else parts


def orthogonalised(matrices: list[nn.Parameter], rows: list[Tensor], first: int) -> list[Tensor]:
    """Orthogonalise matrices. Returns this rank's rows of each.

    Args:
        matrices: parameters of one shape (M, N), sharded alike.
        rows: this rank's rows of the values to orthogonalise, one tensor per matrix.
        first: the first matrix's owner, modulo the number of owners; the next owner has the next matrix. Owner k is
            rank k // replicas of replica k % replicas. From owner 0, with 2 replicas of 2 ranks, the owners are
            (replica 0, rank 0), (1, 0), (0, 1), (1, 1).
    """
    group, n_replicas, replica = ranks_of(matrices[0], of_replicas=True)
    of_replica = [range((i - first) % n_replicas, len(rows), n_replicas) for i in range(n_replicas)]  # its matrices
    own = of_replica[replica]
    own_rows = _within_replica([matrices[i] for i in own], [rows[i] for i in own], (first + own.start) // n_replicas)
    if group is None:
        return own_rows
    if not rows[0].numel():  # the other ranks of `group` have no rows either
        return rows
    n_sent = -(-len(rows) // n_replicas)
    sent = rows[0].new_zeros(n_sent, *rows[0].shape)
    for place, part in zip(sent, own_rows, strict=False):
        place.copy_(part)
    received = sent.new_empty(n_replicas, *sent.shape)
    dist.all_gather(list(received), sent, group=group)
    result = rows[:]
    for its, parts in zip(of_replica, received, strict=True):
        for i, part in zip(its, parts, strict=False):
            result[i] = part
    return result


def _within_replica(matrices: list[nn.Parameter], rows: list[Tensor], first: int) -> list[Tensor]:
    """Orthogonalise matrices among the ranks of one replica, as in `orthogonalised`."""
    if not matrices:
        return []
    group, n_ranks, rank = ranks_of(matrices[0])
    if group is None:
        return _each(torch.stack(rows)) if rows[0].is_cuda else _each(rows)
    m, n = matrices[0].shape[-2:]
    if by_columns := shard_dim(matrices[0]) == matrices[0].ndim - 1:  # the rows of the transposed matrix
        m, n, rows = n, m, [part.T for part in rows]
    per_rank = -(-m // n_ranks)  # torch.chunk's split of dim 0: the first ranks may have all rows
    counts = [min(per_rank, m - first_row) for first_row in range(0, m, per_rank)]
    own_count = counts[rank] if rank < len(counts) else 0
    # List only owners and ranks with rows: there may be far more ranks than either.
    owned = {(first + i) % n_ranks: range(i, len(rows), n_ranks) for i in range(min(n_ranks, len(rows)))}
    owners = sorted(owned)
    n_owned = len(owned.get(rank, ()))
    sent = torch.cat([rows[i].reshape(-1) for owner in owners for i in owned[owner]])
    to_owners = [0] * n_ranks
    for owner in owners:
        to_owners[owner] = len(owned[owner]) * own_count * n
    from_ranks = [n_owned * count * n for count in counts] + [0] * (n_ranks - len(counts))
    received = sent.new_empty(sum(from_ranks))
    dist.all_to_all_single(received, sent, from_ranks, to_owners, group=group)
    orthogonal: list[Tensor] = []
    if n_owned:
        wholes = received.new_empty(n_owned, m, n)
        for block, first_row in _blocks(received, n_owned, m, n, per_rank):
            _rows_of(wholes, block, first_row).copy_(block.transpose(0, 1))
        orthogonal = _each(wholes if wholes.is_cuda else list(wholes), transposed=by_columns)
        del wholes, block  # views of them would keep `received` alive
    del received
    sent = sent.new_empty(sum(from_ranks))
    if orthogonal:
        for block, first_row in _blocks(sent, n_owned, m, n, per_rank):
            torch.stack([_rows_of(whole[None], block, first_row)[0] for whole in orthogonal], dim=1, out=block)
    del orthogonal
    received = sent.new_empty(sum(to_owners))
    dist.all_to_all_single(received, sent, to_owners, from_ranks, group=group)
    result = rows[:]
    for owner, part in zip(owners, received.split([to_owners[owner] for owner in owners]), strict=True):
        for i, own in zip(owned[owner], part.view(len(owned[owner]), own_count, n), strict=True):
            result[i] = own.T if by_columns else own
    return result


def _blocks(flat: Tensor, n_matrices: int, m: int, n: int, per_rank: int) -> Iterator[tuple[Tensor, int]]:
    """Yield an owner's buffer as views (ranks, matrices, rows per rank, N), each with its first row.

    One view spans all ranks with `per_rank` rows, so the time does not grow with the ranks. The second is for the last
    rank, if it has fewer.
    """
    full = m // per_rank
    cut = full * per_rank
    yield flat[: cut * n_matrices * n].view(full, n_matrices, per_rank, n), 0
    if cut < m:
        yield flat[cut * n_matrices * n :].view(1, n_matrices, m - cut, n), cut


def _rows_of(wholes: Tensor, block: Tensor, first_row: int) -> Tensor:
    """Return a block's rows in matrices (B, M, N), as (B, ranks, rows per rank, N)."""
    ranks, _, rows, _ = block.shape
    return wholes[:, first_row : first_row + ranks * rows].unflatten(1, (ranks, rows))


def _each(wholes: Tensor | list[Tensor], *, transposed: bool = False) -> list[Tensor]:
    """Apply Newton-Schulz to each matrix: on a GPU as a batch, (B, M, N), on a CPU one by one.

    Args:
        transposed: take and return transposed matrices. (A matrix and its transpose round differently.)
    """
    if isinstance(wholes, Tensor) and wholes.is_cuda:
        return list(newton_schulz(wholes.mT).mT if transposed else newton_schulz(wholes))
    if transposed:
        # Strides affect a matmul's rounding. `view` gives a one-row matrix the strides that it would have if it had
        # never been transposed.
        return [newton_schulz(whole.T.view(whole.T.shape)).T for whole in wholes]
    return [newton_schulz(whole) for whole in wholes]


def newton_schulz(x: Tensor) -> Tensor:
    """Return matrices with the singular vectors of x, (M, N) or (B, M, N), and singular values near 1."""
    a, b, c = COEFFICIENTS
    add = torch.baddbmm if x.ndim == 3 else torch.addmm
    wide = x.shape[-2] <= x.shape[-1]
    x = (x if wide else x.mT).contiguous()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = add(x, add(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT.contiguous()
