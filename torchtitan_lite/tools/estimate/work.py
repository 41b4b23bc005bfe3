"""Counts a rank's work in a simulated step: matmuls by shape, attention, bytes of all other operators, and collectives.

In compiled blocks, bytes are counted as fused kernels move them: between two matmuls, one kernel reads its inputs and
writes what is needed later. The step of optim.muon is not simulated, but counted from its matrices.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.derive import Layout
from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.optim.groups import freeze, parameter_groups
from torchtitan_lite.optim.muon import ITERATIONS, balanced, cost, dtype_of_iteration, exchanges

EXCHANGED, GATHERED = "all-to-all, muon", "all-gather, muon"  # kinds of collectives of optim.muon


@dataclass(frozen=True)
class Matmul:
    """(m, k) x (k, n), `batch` times in one call."""

    phase: str  # "forward", "backward" or "optimizer"
    batch: int
    m: int
    n: int
    k: int
    width: int  # bytes of an element


@dataclass(frozen=True)
class Attention:
    """Attention of `heads` heads in total, with `scores` scores and `matmuls` matmuls (T, S) x (S, D) per head."""

    phase: str
    heads: int
    scores: float  # T S; half if causal
    head_dim: int
    matmuls: int
    width: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of memory that operators other than matmuls read and write, or the number of their kernels."""

    phase: str
    kernels: bool = False


Work = Matmul | Attention | Traffic


@dataclass(frozen=True)
class Collective:
    """One collective over `ranks`; `bytes` is the full size that is gathered, scattered or summed."""

    kind: str  # "all-gather, forward", "all-gather, backward", "reduce-scatter", "all-reduce", or optim.muon's
    bytes: int
    ranks: int


@dataclass(eq=False)
class Storage:
    """Bytes of memory."""

    bytes: int
    kind: str
    reference: Any  # the weak reference that reports its release
    freed: bool = False


# positions of the two inputs
_MATMULS = {"mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "baddbmm_": (1, 2)}
# read only rows of their first argument
_LOOKUPS = {"embedding", "gather", "index", "index_select", "nll_loss_forward", "embedding_dense_backward"}
_FREE = {"_unsafe_view", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "resize_", "detach"}
_WRITE_ONLY = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}


@dataclass
class Recorder:
    """Counts the work of parts of the step.

    Args:
        storage_of: returns the tracked storage of a tensor, or None.
    """

    storage_of: Callable[[Tensor], Storage | None]
    work: Counter[Work] = field(default_factory=Counter)
    _read: dict[Storage, int] = field(default_factory=dict)  # bytes read so far by the fused kernel
    _made: set[Storage] = field(default_factory=set)

    def take(self) -> Counter[Work]:
        """Return the work since the last call."""
        self.end_of_kernel("")
        work, self.work = self.work, Counter()
        return work

    def end_of_kernel(self, phase: str) -> None:
        """End a fused kernel: it has read its inputs, and writes what is still held."""
        written = sum(storage.bytes for storage in self._made if not storage.freed)
        if self._read or written:
            self.work[Traffic(phase)] += sum(self._read.values()) + written
            self.work[Traffic(phase, kernels=True)] += 1
        self._read, self._made = {}, set()

    def count(self, operator: Any, args: tuple[Any, ...], kwargs: Any, out: Any, phase: str, *, fused: bool) -> None:
        """Count one operator.

        Args:
            fused: whether a compiler fuses it with its neighbours.
        """
        name, schema = operator.overloadpacket.__name__, operator._schema
        if work := _matmuls(name, args, out, phase):
            self.end_of_kernel(phase)
            self.work[work] += 1
        elif name not in _FREE and (schema.is_mutable or all(r.alias_info is None for r in schema.returns)):  # no view
            inputs, outputs = tensors_of((args, kwargs)), tensors_of(out)
            if not fused:
                self.work[Traffic(phase)] += _bytes(operator, args, inputs, outputs)
                self.work[Traffic(phase, kernels=True)] += 1
                return
            for tensor in inputs if name not in _LOOKUPS else ():
                storage = self.storage_of(tensor)
                if storage is not None and storage not in self._made:
                    self._read[storage] = max(self._read.get(storage, 0), _size(tensor))
            self._made |= {storage for tensor in outputs if (storage := self.storage_of(tensor)) is not None}


def _matmuls(name: str, args: tuple[Any, ...], out: Any, phase: str) -> Matmul | Attention | None:
    """Return the matmuls that an operator computes, if any."""
    if name in _MATMULS:
        a, b = (args[i] for i in _MATMULS[name])
        return Matmul(phase, a.shape[0] if a.ndim == 3 else 1, a.shape[-2], b.shape[-1], a.shape[-1], a.element_size())
    if name == "linalg_solve_triangular":
        # (..., C, C) and (..., C, V): a triangle takes half the work of a matrix
        *batch, size, columns = args[1].shape
        return Matmul(phase, math.prod(batch), size, columns, size // 2, args[1].element_size())
    if name in ("grouped_matmul", "grouped_gradient"):
        # (rows, inputs) x (experts, outputs, inputs), and its gradient from (rows, outputs) x (rows, inputs)
        experts = len(args[1]) if name == "grouped_matmul" else len(out)
        rows = -(-len(args[0]) // experts)
        return Matmul(phase, experts, rows, args[1].shape[1], args[0].shape[1], args[0].element_size())
    if "scaled_dot_product" not in name:
        return None
    backward = "backward" in name
    q, k = args[1:3] if backward else args[:2]
    batch, heads, length, head_dim = q.shape
    causal = any(value is True for value in args)  # the only flag
    scores = length * k.shape[2] / (2 if causal else 1)
    return Attention(phase, batch * heads, scores, head_dim, 5 if backward else 2, q.element_size())


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts; the shards of DTensors."""
    if isinstance(tree, Tensor):
        return [local(tree)]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


def local(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor, or any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _size(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())  # an expanded tensor is read from the cache


def _bytes(operator: Any, args: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the bytes that an operator reads and writes."""
    name, schema = operator.overloadpacket.__name__, operator._schema
    if name in _LOOKUPS:
        return 2 * sum(map(_size, outputs))
    total = sum(map(_size, inputs))
    if not schema.is_mutable:
        return total + sum(map(_size, outputs))
    if name not in _WRITE_ONLY:  # tensors changed in place were counted as read
        for value, argument in zip(args, schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only:
                total += sum(map(_size, tensors_of(value)))
    return total


def muon_step(
    model: nn.Module, config: OptimConfig, layout: Layout, *, on_gpu: bool
) -> tuple[Counter[Work], Counter[Collective]]:
    """Count what a step of optim.muon computes and sends. It follows backward, so nothing hides it.

    The slowest owner of each exchange counts:

        matmuls      five iterations of three matmuls, for each matrix that it owns, and for each expert that it holds
        all-to-all   the parts of its matrices, received and sent back
        all-gather   with replicas, each of which orthogonalises some matrices: this rank's parts of all matrices

    Args:
        model: on the meta device, not sharded.
    """
    work: Counter[Work] = Counter()
    sent: Counter[Collective] = Counter()
    freeze(model, config.freeze)
    width, n_owners = dtype_of_iteration(on_gpu=on_gpu).itemsize, layout.dp_shard * layout.dp_replicate
    matrices = [p for group in parameter_groups(model, config) if group.get("muon") for p in group["params"]]
    for exchanged in exchanges(matrices, n_owners):
        split = [matrix for matrix in exchanged if matrix.ndim == 2]
        owned = [[split[i] for i in numbers] for numbers in balanced([cost(*m.shape) for m in split], n_owners)]
        computed = [m.shape for m in max(owned, key=lambda of_one: sum(cost(*m.shape) for m in of_one))]
        for stack in exchanged:
            if stack.ndim == 3:  # each rank holds whole matrices
                computed += [stack.shape[1:]] * -(-len(stack) // layout.dp_shard)
        if split and layout.dp_shard > 1:
            padded = [[-(-len(m) // layout.dp_shard) * layout.dp_shard * m.shape[1] for m in each] for each in owned]
            most = max(map(sum, padded))
            sent[Collective(EXCHANGED, most * width, layout.dp_shard)] += 2
        if split and layout.dp_replicate > 1:
            part = sum(m.numel() for m in split) // layout.dp_shard
            sent[Collective(GATHERED, part * width, layout.dp_replicate)] += 1
        for short, long in map(sorted, computed):
            for shape in ((short, short, long), (short, short, short), (short, long, short)):
                work[Matmul("optimizer", 1, *shape, width)] += ITERATIONS
    return work, sent
