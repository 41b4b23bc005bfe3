"""speed.float8: torchao's float8 matmuls in the blocks' linear layers, with one scale per tensor.

Each rank casts its rows of a weight before they are gathered, so the all-gather moves half the bytes of bfloat16. In
torchao itself each shard is a subclass of Tensor, which initial values, optimizers and checkpoints would all have to
handle. FSDP2 calls only two methods of a shard. So here shards stay plain float32 tensors with torchao's two methods as
attributes, and nothing else depends on float8.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models import Transformer

MULTIPLE = 16  # float8 matmuls need sizes that are multiples of this
CAPABILITY = 8, 9
DTYPE = torch.float8_e4m3fn
LEAST = 1e-12  # torchao's EPS: keeps the scale of an all-zero weight finite


def wrong_shapes(model: Transformer, shards: int) -> Iterator[str]:
    """Yield a message that names the first linear layer of the blocks whose size float8 does not support.

    Args:
        shards: number of ranks that shard a replica.
    """
    wrong = []
    for name, layer in _linears(model):
        rows, columns = layer.weight.shape
        if rows % MULTIPLE or columns % MULTIPLE:
            wrong.append(f"{name} is {rows} x {columns}, but sizes have to be multiples of {MULTIPLE}")
        elif rows % shards:
            wrong.append(f"{name} has {rows} rows, which fsdp.dp_shard = {shards} does not divide")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        yield f"speed.float8 = true: {wrong[0]}{more}; speed.float8 = false works"


def convert(model: Transformer, mesh: DeviceMesh) -> None:
    """Convert the blocks' linear layers to float8 matmuls, which a CPU emulates. Call it before sharding.

    Raises:
        ConfigError: the GPU has no float8 matmuls.
    """
    emulate = mesh.device_type == "cpu"
    if not emulate and (capability := torch.cuda.get_device_capability()) < CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (CAPABILITY, capability))
        raise ConfigError(
            f"speed.float8 = true needs a GPU of compute capability {needed} or newer (L40, RTX 40, H100), but "
            f"{torch.cuda.get_device_name()} has {found}; speed.float8 = false works"
        )
    # importing torchao warns on each rank about kernels for other devices, which we do not use
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for layer in model.layers:
        convert_to_float8_training(layer, config=Float8LinearConfig(emulate=emulate))


def gather_in_float8(model: Transformer) -> None:
    """Cast the sharded weights of converted layers before they are gathered. Call it after `apply_fsdp`."""
    weights: list[Weight] = []
    scaled: list[int] = []  # the versions of the shards at the last update of the scales

    def before_forward(_model: nn.Module, _args: tuple[Any, ...]) -> None:
        if not weights:  # only now do the shards have storage
            weights.extend(Weight(layer) for _, layer in _linears(model))
        # Loads and swaps with averages write all shards in place, on every rank, so the ranks agree on when to update.
        # A write to a DTensor does not change its shard's version.
        versions = [tensor._version for weight in weights for tensor in (weight.sharded, weight.shard)]
        if versions != scaled:
            update_scales(weights)
            scaled[:] = versions

    register_optimizer_step_post_hook(lambda *_: scaled.clear())  # it may write to `.data`, which has its own version
    # before FSDP2's hook, which prepares the parameters and makes its streams wait for the scales
    model.register_forward_pre_hook(before_forward, prepend=True)


class Weight:
    """The shard of a converted layer's weight, and torchao's tensor that casts it."""

    def __init__(self, layer: Any) -> None:
        from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

        assert isinstance(layer.weight, DTensor)
        self.sharded = layer.weight
        self.shard: Tensor = layer.weight._local_tensor  # `to_local` may return a different tensor object
        self.cast = WeightWithDynamicFloat8CastTensor(self.shard, layer.linear_mm_config, DTYPE)
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            setattr(self.shard, name, getattr(self.cast, name))


@torch.no_grad()
def update_scales(weights: list[Weight]) -> None:
    """Compute the scale of each weight from its largest element on any rank. Collective: one all-reduce."""
    largest = torch.stack(torch._foreach_norm([weight.shard for weight in weights], ord=math.inf))
    mesh = weights[0].sharded.device_mesh
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(mesh.ndim - 1))
    # in float64, as torchao does
    scales: Tensor = (torch.finfo(DTYPE).max / largest.clamp(min=LEAST).double()).float()
    for weight, scale in zip(weights, scales.unbind(), strict=True):
        weight.cast._precomputed_scale = scale


def _linears(model: Transformer) -> list[tuple[str, nn.Linear]]:
    """Return name and module of each linear layer in the blocks, without the output matrix."""
    modules = model.layers.named_modules(prefix="layers")
    return [(name, module) for name, module in modules if isinstance(module, nn.Linear)]
