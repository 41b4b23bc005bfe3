"""train.py with a change that no key offers: `torchrun -m benchmarks.gpu_variants NAME [options of train.py]`.

benchmarks/gpu.py runs it for the rows that try something out. What wins on a GPU becomes a key.
"""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel

import train
from torchtitan_lite.distributed import parallelize
from torchtitan_lite.distributed.process_group import exit_process
from torchtitan_lite.errors import ConfigError, run_cli

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def use_attention(backend: SDPBackend) -> None:
    """Have every attention use one backend."""
    original = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        with sdpa_kernel(backend):
            return original(*args, **kwargs)

    F.scaled_dot_product_attention = attention


def around_fsdp(before: Callable[[nn.Module], None], after: Callable[[nn.Module], None]) -> None:
    """Change the model before and after it is sharded."""
    original = parallelize.apply_fsdp

    def apply_fsdp(model: Any, *args: Any) -> None:
        before(model)
        original(model, *args)
        after(model)

    parallelize.apply_fsdp = apply_fsdp  # type: ignore[assignment]


def _method(module: nn.Module, name: str) -> Any:
    if not hasattr(module, name):
        raise ConfigError(f"torch {torch.__version__} has no FSDPModule.{name}")
    return getattr(module, name)


def symmetric_memory(model: nn.Module) -> None:
    """Let NCCL gather from symmetric memory, on one machine by its copy engines.

    Raises:
        ConfigError: torch cannot.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _method(module, "set_symm_mem_for_comm")()
            module.set_force_sum_reduction_for_comms(True)  # its reduce-scatter has no average


def separate_groups(model: nn.Module) -> None:
    """Give reduce-scatter a communicator of its own, so that it does not wait for all-gather.

    Raises:
        ConfigError: torch cannot.
    """
    _method(model, "set_separate_reduce_scatter_group")()


def to_float8(model: nn.Module, *, emulate: bool = False) -> None:
    """Have the linear layers of the blocks multiply in float8 with a scale per row (torchao).

    Args:
        emulate: compute in float32 what a GPU would compute, for tests.

    Raises:
        ConfigError: torchao is not installed.
    """
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except ImportError as error:
        raise ConfigError(f"torchao is not installed ({error})") from error
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    for layer in model.layers:  # type: ignore[union-attr]  # the output matrix stays as it is
        float8.convert_to_float8_training(layer, config=config)


def _nothing(_: Any) -> None:
    pass


VARIANTS: dict[str, Callable[[], None]] = {
    **{name: functools.partial(use_attention, backend) for name, backend in BACKENDS.items()},
    "symmetric-memory": functools.partial(around_fsdp, _nothing, symmetric_memory),
    "separate-groups": functools.partial(around_fsdp, _nothing, separate_groups),
    "float8": functools.partial(around_fsdp, to_float8, _nothing),
    "float8-emulated": functools.partial(around_fsdp, functools.partial(to_float8, emulate=True), _nothing),
}


def main(argv: list[str]) -> int:
    """Apply the variant, then train. Returns the exit code."""

    def start() -> int:
        if argv[:1] == [] or argv[0] not in VARIANTS:
            raise ConfigError(f"the first argument should be one of {', '.join(VARIANTS)}")
        VARIANTS[argv[0]]()
        return train.main(argv[1:])

    return run_cli("benchmarks.gpu_variants", start)


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
