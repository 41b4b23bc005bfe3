"""What the device computes in a simulated step: products by shape, attention, and bytes of everything else.

The bytes are counted twice: as the operators move them one by one, and as fused kernels would. Between two products, a
fused kernel reads what was computed before and writes what is needed afterwards. Only blocks are ever compiled.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Product:
    """(m, k) x (k, n), `batch` times in one call."""

    phase: str  # "forward", "backward" or "optimizer"
    batch: int
    m: int
    n: int
    k: int
    width: int  # bytes of an element


@dataclass(frozen=True)
class Attention:
    """Attention of `heads` heads in all, with `scores` of each; `products` of (T, S) x (S, D) per head."""

    phase: str
    heads: int
    scores: float  # T S; half of it if causal
    head_dim: int
    products: int
    width: int


@dataclass(frozen=True)
class Traffic:
    """Bytes of memory that operators other than products read and write, or the number of their kernels."""

    phase: str
    fused: bool
    kernels: bool = False


Work = Product | Attention | Traffic


class Held(Protocol):
    """A storage that the simulation follows."""

    bytes: int
    died: int | None


# position of the two factors
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "baddbmm_": (1, 2)}
# they read only rows of their first argument
_LOOKUPS = {"embedding", "gather", "index", "index_select", "nll_loss_forward", "embedding_dense_backward"}
_FREE = {"_unsafe_view", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "resize_", "detach"}
_WRITE_ONLY = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}


@dataclass
class Recorder:
    """Counts the work of a part of the step."""

    found: Counter[Work] = field(default_factory=Counter)
    _read: dict[int, int] = field(default_factory=dict)  # of the fused kernel so far, by storage
    _made: dict[int, Held] = field(default_factory=dict)

    def take(self) -> Counter[Work]:
        """What was counted since the last call."""
        self.end_of_kernel("")
        found, self.found = self.found, Counter()
        return found

    def end_of_kernel(self, phase: str) -> None:
        """A fused kernel ends here: it has read its inputs, and writes what is still held."""
        written = sum(storage.bytes for storage in self._made.values() if storage.died is None)
        if self._read or written:
            self.found[Traffic(phase, fused=True)] += sum(self._read.values()) + written
            self.found[Traffic(phase, fused=True, kernels=True)] += 1
        self._read, self._made = {}, {}

    def see(
        self, function: Any, args: Any, kwargs: Any, out: Any, phase: str, held: dict[int, Any], fused: bool
    ) -> None:
        """Count one operator.

        Args:
            held: the storages that exist, by id.
            fused: whether a compiler would fuse it with its neighbours.
        """
        name = function.overloadpacket.__name__
        tensors = _tensors((args, kwargs))
        if name in _PRODUCTS:
            a, b = (args[i] for i in _PRODUCTS[name])
            batch = a.shape[0] if a.ndim == 3 else 1
            self.end_of_kernel(phase)
            self.found[Product(phase, batch, a.shape[-2], b.shape[-1], a.shape[-1], a.element_size())] += 1
        elif "scaled_dot_product" in name:
            backward = "backward" in name
            q, k = args[1:3] if backward else args[:2]
            b, h, t, d = q.shape
            causal = any(value is True for value in args)  # the only flag
            self.end_of_kernel(phase)
            self.found[
                Attention(
                    phase, b * h, t * k.shape[2] / (2 if causal else 1), d, 5 if backward else 2, q.element_size()
                )
            ] += 1
        elif name not in _FREE and not _is_view(function):
            outputs = _tensors(out)
            eager = _bytes(function, name, tensors, args, outputs)
            for way in (False, True)[: 1 if fused else 2]:
                self.found[Traffic(phase, way)] += eager
                self.found[Traffic(phase, way, kernels=True)] += 1
            if not fused:
                return
            if name not in _LOOKUPS:
                for tensor in tensors:
                    storage = held.get(id(tensor.untyped_storage()))
                    if storage is not None and id(storage[1]) not in self._made:
                        self._read[id(storage[1])] = max(self._read.get(id(storage[1]), 0), _size(tensor))
            for tensor in outputs:
                storage = held.get(id(tensor.untyped_storage()))
                if storage is not None:
                    self._made[id(storage[1])] = storage[1]


def _tensors(tree: Any) -> list[Tensor]:
    found = [t for t in tree_leaves(tree) if isinstance(t, Tensor)]
    return [t.to_local() if isinstance(t, DTensor) else t for t in found]


def _size(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())  # an expanded tensor is read from the cache


def _is_view(function: Any) -> bool:
    schema = function._schema
    return not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)


def _bytes(function: Any, name: str, tensors: list[Tensor], args: Any, outputs: list[Tensor]) -> int:
    """Bytes that an operator reads and writes."""
    if name in _LOOKUPS:
        return 2 * sum(map(_size, outputs))
    total = sum(map(_size, tensors))
    schema = function._schema
    if not schema.is_mutable:
        return total + sum(map(_size, outputs))
    if name not in _WRITE_ONLY:  # what is changed in place was counted as read
        for given, argument in zip(args, schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only:
                total += sum(map(_size, _tensors(given)))
    return total
