"""The few functions of Triton that models/loss_kernel.py uses, by PyTorch on the CPU, one program after the other.

It shows what the kernel computes, not that a GPU can compile it.
"""

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_program = [0]


class Pointer:
    """The address of elements of a tensor's storage."""

    def __init__(self, values: Tensor, offset: Any = 0) -> None:
        self.values, self.offset = values, offset

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.values, self.offset + more)

    def _at(self, mask: Any) -> tuple[Tensor, Tensor]:
        """The storage as a flat tensor, and the indices where the mask is true. An index out of range raises."""
        n = self.values.untyped_storage().nbytes() // self.values.element_size()
        flat = self.values.as_strided((n,), (1,), 0)
        index = torch.as_tensor(self.offset + self.values.storage_offset())
        return flat, index[mask] if isinstance(mask, Tensor) and mask.ndim else index


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    flat, index = pointer._at(mask)
    if mask is None:
        return flat[index]
    if not mask.ndim:
        return flat[index] if mask else torch.tensor(other)
    out = torch.full(mask.shape, other, dtype=flat.dtype)
    out[mask] = flat[index]
    return out


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    flat, index = pointer._at(mask)
    value = torch.as_tensor(value)
    flat[index] = (value[mask] if mask is not None and value.ndim else value).to(flat.dtype)


class Jit:
    """`kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps in (1, 2, 4, 8, 16, 32), num_warps
            given = [Pointer(a) if isinstance(a, Tensor) else a for a in args]
            for _program[0] in range(grid[0]):
                self._function(*given, **constants)

        return launch


def kernel_module() -> Any:
    """models/loss_kernel.py, imported with this as its Triton. Nothing else gets to see it."""
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.jit, triton.language = Jit, language  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    parts: dict[str, Any] = {
        "constexpr": int,
        "int64": torch.int64,
        "float32": torch.float32,
        "program_id": lambda _: torch.tensor(_program[0], dtype=torch.int32),
        "arange": torch.arange,
        "load": load,
        "store": store,
        "max": lambda x, dim: x.nan_to_num(nan=-float("inf"), posinf=float("inf"), neginf=-float("inf")).amax(dim),
        "sum": torch.sum,
        "exp": torch.exp,
        "log": torch.log,
        "maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        "where": torch.where,
    }
    for name, part in parts.items():
        setattr(language, name, part)
    name = "torchtitan_lite.models.loss_kernel"
    with patch.dict(sys.modules, {"triton": triton, "triton.language": language}):
        sys.modules.pop(name, None)
        return importlib.import_module(name)
