"""FSDP2 from outside: the model's file knows nothing of it.

Groups of parameters that are gathered together, in the order of forward:

    inputs (token and position embeddings) -> layers.0 -> ... -> layers.L-1 -> head (norm, output)

Tied embeddings are a parameter of both ends, so the ends are one group, which stays whole from the first to the last.

`fully_shard` comes after whatever changes a block, bottom up, the root last. The root owns no parameters, but its call
is needed: it makes the groups share streams and buffers.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torchtitan_lite.config import FsdpConfig
from torchtitan_lite.models import Transformer


def apply_fsdp(model: Transformer, mesh: DeviceMesh, config: FsdpConfig) -> None:
    """Shard a model on the meta device over the mesh, in place, and wire the prefetching."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype),
        reduce_dtype=getattr(torch, config.reduce_dtype),
        # inputs have the right dtype already; what a model keeps in float32 on purpose (rotary tables) must stay so
        cast_forward_inputs=False,
    )
    *others, head = _groups(model)
    for group in others:
        # The embeddings in a group of their own are freed while the layers run.
        fully_shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    # The head stays whole after forward: backward starts with it, and would gather it again at once.
    fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if config.explicit_prefetching:
        _set_prefetch(model, config.forward_prefetch, config.backward_prefetch)


def _groups(model: Transformer) -> list[list[nn.Module]]:
    """The modules of each group, in the order of forward; tied ends count as the head."""
    after_input = {"layers", "norm", "output"}
    inputs = [m for name, m in model.named_children() if name not in after_input and any(True for _ in m.parameters())]
    layers = [[layer] for layer in model.layers]
    head: list[nn.Module] = [model.norm, model.output]
    return [*layers, inputs + head] if model.config.tie_embeddings else [inputs, *layers, head]


def _set_prefetch(model: Transformer, forward: int, backward: int) -> None:
    """While a group computes, gather the next `forward` groups (in backward: the `backward` groups before it).

    Without these lists forward gathers each group when it is reached (on CUDA the host runs ahead, so it overlaps all
    the same), and backward one group ahead. A list replaces that default.
    """
    # One module stands for its group: the modules of a group share their FSDP state.
    chain = [_fsdp(group[0]) for group in _groups(model)]
    # Tied ends come first as well, and are whole when they come last.
    forward_chain = [chain[-1], *chain[:-1]] if model.config.tie_embeddings else chain
    for i, module in enumerate(forward_chain):
        module.set_modules_to_forward_prefetch(forward_chain[i + 1 : i + 1 + forward])
    for i, module in enumerate(chain):
        module.set_modules_to_backward_prefetch(chain[max(i - backward, 0) : i][::-1])


def unshard_first(model: Transformer) -> None:
    """Start the first group's all-gather, so that it overlaps with whatever comes before forward.

    (`model.unshard()` gathers only what the root itself owns, and here that is nothing.)
    """
    _fsdp(model.tok_embeddings).unshard(async_op=True)


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward left gathered, so that `parameters()` are the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
