"""Muon (Jordan et al., 2024) for sharded matrices: momentum, orthogonalised by a Newton-Schulz iteration.

The iteration needs whole matrices, but a rank has only rows. So each matrix has an owner. An all-to-all sends the rows
of many matrices to their owners, each owner orthogonalises its matrices, and a second all-to-all returns the rows. With
HSDP, each replica handles a share of the matrices, and an all-gather between replicas exchanges the results. For N
parameters on k replicas of R ranks, a rank sends about 2 N / (k R) elements, and with several replicas another N / R.

On a CPU an owner computes one matrix at a time, so updates are the same on any number of ranks, bit for bit. On a GPU
it batches its matrices of one shape, which launches fewer kernels, but whose matmuls may round differently.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

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
        first = 0  # the next matrix's owner; owners take turns across shapes
        for group in self.param_groups:
            if group["muon"]:
                for matrices in exchanges(p for p in group["params"] if p.grad is not None):
                    self._update(matrices, first, group["lr"], group["weight_decay"])
                    first += len(matrices)

    def _update(self, matrices: list[nn.Parameter], first: int, lr: float, weight_decay: float) -> None:
        """Update matrices of one shape; `first`: see `orthogonalise`."""
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
        (orthogonalise if matrices[0].ndim == 2 else orthogonalise_stacks)(matrices, updates, first)
        # 0.2 sqrt(max(M, N)) gives an orthogonal update the size of AdamW's (Moonlight, 2025)
        torch._foreach_mul_(updates, 0.2 * max(matrices[0].shape[-2:]) ** 0.5)
        torch._foreach_add_(updates, torch._foreach_mul(weights, weight_decay))
        torch._foreach_mul_(updates, lr)
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


def orthogonalise_stacks(stacks: list[nn.Parameter], parts: list[Tensor], first: int) -> None:
    """Orthogonalise each matrix of stacks (E, M, N), such as a layer's experts, in place.

    Unless a stack is split at dim 1, each rank has whole matrices and needs no exchange. (Every replica computes all.)

    Args:
        parts: this rank's parts of the stacks.
    """
    each = [matrix for part in parts for matrix in part]
    if shard_dim(stacks[0]) > 0:  # this rank has some rows or columns of each matrix
        orthogonalise([stack for stack in stacks for _ in range(len(stack))], each, first)
    elif each:
        _orthogonalise_whole(each)


def orthogonalise(matrices: list[nn.Parameter], rows: list[Tensor], first: int) -> None:
    """Orthogonalise matrices in place.

    Args:
        matrices: parameters of one shape (M, N), sharded alike.
        rows: this rank's rows of the values to orthogonalise, one tensor per matrix.
        first: the first matrix's owner, modulo the number of owners; the next owner has the next matrix. Owner k is
            rank k // replicas of replica k % replicas. From owner 0, with 2 replicas of 2 ranks, the owners are
            (replica 0, rank 0), (1, 0), (0, 1), (1, 1).
    """
    group, n_replicas, replica = ranks_of(matrices[0], of_replicas=True)
    own = range((replica - first) % n_replicas, len(rows), n_replicas)  # this replica's matrices
    if own:
        _within_replica([matrices[i] for i in own], [rows[i] for i in own], (first + own.start) // n_replicas)
    if group is None or not rows[0].numel():  # without rows here, the other ranks of `group` have none either
        return
    dtype = dtype_of_iteration(on_gpu=rows[0].is_cuda)
    sent = rows[0].new_zeros(-(-len(rows) // n_replicas), *rows[0].shape, dtype=dtype)
    if own:
        torch._foreach_copy_(list(sent[: len(own)]), [rows[i] for i in own])
    received = sent.new_empty(n_replicas, *sent.shape)
    dist.all_gather(list(received), sent, group=group)
    torch._foreach_copy_(rows, [received[(first + i) % n_replicas, i // n_replicas] for i in range(len(rows))])


def _within_replica(matrices: list[nn.Parameter], rows: list[Tensor], first: int) -> None:
    """Orthogonalise matrices among the ranks of one replica, as in `orthogonalise`."""
    group, n_ranks, rank = ranks_of(matrices[0])
    if group is None:
        return _orthogonalise_whole(rows)
    m, n = matrices[0].shape[-2:]
    if by_columns := shard_dim(matrices[0]) == matrices[0].ndim - 1:  # the rows of the transposed matrix
        m, n, rows = n, m, [part.T for part in rows]
    per_rank = len(shard_range(m, n_ranks, 0))
    n_holders = -(-m // per_rank)  # the first ranks may have all rows; the last of them sends padding too
    owners = [(first + i) % n_ranks for i in range(len(rows))]
    n_owned, by_owner = owners.count(rank), sorted(range(len(rows)), key=owners.__getitem__)
    to_owners, from_ranks = [0] * n_ranks, [n_owned] * n_holders + [0] * (n_ranks - n_holders)
    sent = rows[0].new_zeros(
        len(rows) if rank < n_holders else 0, per_rank, n, dtype=dtype_of_iteration(on_gpu=rows[0].is_cuda)
    )
    places = [place[: len(rows[i])] for place, i in zip(sent, by_owner, strict=False)]
    ours = [rows[i] for i in by_owner[: len(places)]]
    if places:
        torch._foreach_copy_(places, ours)
        to_owners = [owners.count(owner) for owner in range(n_ranks)]
    received = sent.new_empty(n_holders * n_owned, per_rank, n)
    dist.all_to_all_single(received, sent, from_ranks, to_owners, group=group)
    # (owned, M with padding, N)
    wholes = received.view(n_holders, n_owned, per_rank, n).transpose(0, 1).flatten(1, 2)
    if n_owned:
        _orthogonalise_whole(list(wholes[:, :m].mT if by_columns else wholes[:, :m]))
    received = wholes.unflatten(1, (n_holders, per_rank)).transpose(0, 1).flatten(0, 1)
    dist.all_to_all_single(sent, received, to_owners, from_ranks, group=group)
    if places:
        torch._foreach_copy_(ours, places)
    return None


def _orthogonalise_whole(matrices: list[Tensor]) -> None:
    """Orthogonalise whole matrices (M, N) of one shape, in place: on a GPU as a batch, on a CPU one by one."""
    dtype = dtype_of_iteration(on_gpu=matrices[0].is_cuda)
    if matrices[0].is_cuda:
        torch._foreach_copy_(matrices, list(newton_schulz(torch.stack(matrices).to(dtype))))
        return
    for matrix in matrices:
        matrix.copy_(newton_schulz(matrix.to(dtype)))


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
