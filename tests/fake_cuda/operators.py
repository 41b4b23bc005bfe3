"""A log of every operator: the bytes of its outputs, the line of ours that called it, and whether the host waits.

    with FakeTensorMode(), OperatorLog() as log:
        model(tokens, targets).backward()
    print(log.waits)

Inside a compiled function nothing is logged but its outputs (stand_ins.py).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.utils import redirect_to_mode
from torch._higher_order_ops.wrap import inductor_compiled_code
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parent.parent.parent
OURS = tuple(str(ROOT / name) for name in ("torchtitan_lite/", "train.py", "checkpoint.py"))

# Their kernels read a size from the device, by torch's sources.
_SIZE_FROM_DEVICE = {"nonzero", "masked_select", "unique_consecutive", "_unique", "_unique2", "unique_dim", "equal"}
_SIZE_FROM_DEVICE |= {"is_nonzero", "bincount", "argwhere"}


@dataclass(frozen=True)
class Operator:
    """One call of an operator."""

    name: str  # "aten.mm.default"
    written: int  # bytes of its outputs, views included
    where: str  # "train.py:251", the innermost line of ours, or "autograd": a built-in backward has none
    waits: str = ""  # why the host waits for the device; "": it does not


class OperatorLog(TorchDispatchMode):
    """Logs the operators of a block, unless it is paused. A DTensor's operator is logged as those on local tensors."""

    def __init__(self, *, paused: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self._pinned: list[Any] = []  # storages, kept so that no other gets the address
        self._paused = paused

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls operators on its local tensors, which come here
        kwargs = kwargs or {}
        if isinstance(function, HigherOrderOperator):
            name = getattr(args[0], "compile_region_name", None) or "region"
            return self.compiled(name, function, args, kwargs)
        waits = self._waits(function, args, kwargs)
        out = _call(function, args, kwargs)
        self._remember_pinned(function, args, kwargs, out)
        if function.namespace != "prim":  # a question about a tensor, no work
            self.add(str(function), out, waits)
        return out

    def add(self, name: str, out: Any = None, waits: str = "") -> None:
        """Log an operator, or e.g. a wait for an event, or a compiled function."""
        if not self._paused:
            self.operators.append(Operator(name, sum(map(n_bytes, _tensors(out))), calling_line(), waits))

    def compiled(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function as if its operators were one kernel."""
        before, self._paused = self._paused, True
        try:
            out = function(*args, **kwargs)
        finally:
            self._paused = before
        self.add(f"compiled {name}", out)
        return out

    @property
    def waits(self) -> list[Operator]:
        """Those for which the host waits for the device."""
        return [operator for operator in self.operators if operator.waits]

    def _waits(self, function: Any, args: Any, kwargs: Any) -> str:
        """Why the host waits for the device during this operator, or ""."""
        name = _name(function)
        tensors = list(_tensors((args, kwargs)))
        on_device = [t for t in tensors if t.is_cuda]
        if function is torch.ops.aten._local_scalar_dense.default:
            return "reads a value from the device" if on_device else ""
        if on_device and (name in _SIZE_FROM_DEVICE or (name == "repeat_interleave" and not kwargs.get("output_size"))):
            return "reads a size from the device"
        if on_device and name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [t for t in args[1] if t is not None]
            if any(t.dtype in (torch.bool, torch.uint8) for t in indices):
                return "reads the number of elements that a mask selects"
            if any(not t.is_cuda for t in indices):
                return "copies indices to the device"
        if name in ("copy_", "_to_copy", "_foreach_copy_"):
            return self._copy_waits(name, args, kwargs)
        return ""

    def _copy_waits(self, name: str, args: Any, kwargs: Any) -> str:
        if name == "_to_copy":
            source, device = args[0], kwargs.get("device")
            to_device = source.is_cuda if device is None else torch.device(device).type == "cuda"
            # towards the host, torch takes pinned memory for a copy that does not block
            pinned = to_device is False or self._is_pinned(source)
        elif name == "copy_":
            to, source = args[:2]
            to_device = to.is_cuda
            pinned = self._is_pinned(source if to_device else to)
        else:
            to, source = args[0][0], args[1][0]
            to_device, pinned = to.is_cuda, all(self._is_pinned(t) for t in (args[1] if to.is_cuda else args[0]))
        if to_device == source.is_cuda:
            return ""
        non_blocking = kwargs.get("non_blocking") or (name != "_to_copy" and len(args) > 2 and args[2])
        way = "to" if to_device else "from"
        if not non_blocking:
            return f"copies {way} the device and blocks"
        return "" if pinned else f"copies {way} the device through memory that is not pinned"

    def _is_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return any(tensor.untyped_storage()._cdata == kept._cdata for kept in self._pinned)
        with _disable_current_modes():
            return tensor.is_pinned()

    def _remember_pinned(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        to_host = function is torch.ops.aten._to_copy.default and kwargs.get("non_blocking") and args[0].is_cuda
        if kwargs.get("pin_memory") or _name(function) == "_pin_memory" or (to_host and not out.is_cuda):
            self._pinned.append(out.untyped_storage())


def n_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor; those of an expanded dim are the same."""
    n = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        n *= size if stride else min(size, 1)
    return n


def calling_line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (file := frame.f_code.co_filename).startswith(OURS):
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    """The result; for a value of a FakeTensor, which has none, 0."""
    try:
        return function(*args, **kwargs)
    except DataDependentOutputException:
        if function is torch.ops.aten._local_scalar_dense.default:
            with _disable_current_modes():
                return torch.zeros((), dtype=args[0].dtype).item()
        if function is torch.ops.aten.equal.default:
            return True
        raise


def _name(function: Any) -> str:
    return function._schema.name.split("::")[1]


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


redirect_to_mode(inductor_compiled_code, OperatorLog)  # as what is compiled is called where a mode is active
