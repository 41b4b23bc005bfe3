"""FSDP2 applied from outside: the model files do not import it. docs/fsdp.md describes each option.

Parameters are gathered in groups, in the order of forward:

    inputs (token and position embeddings) -> layers.0 -> ... -> layers.L-1 -> head (norm, output)

fsdp.blocks_per_group puts several blocks into one group. Tied inputs and head are one group, which stays gathered
through forward.

Between uses a parameter is a DTensor: each rank has some of its rows, in float32. In a micro-batch, each group does
this:

    forward     all-gather, in param_dtype; compute; free, unless reshard_after_forward is False
    backward    all-gather again, if freed; compute; free; reduce-scatter the gradients, in reduce_dtype

So only the group in use and prefetched groups are gathered, and the optimizer sees only shards. Exceptions:

    the head                          not freed after forward, unless reshard_after_forward is True: backward begins
                                      with it (although with speed.chunked_loss, backward needs only the norm)
    untied embeddings                 not gathered for backward
    reshard_after_backward = false    not freed after backward, so the next micro-batch's forward gathers nothing
    grad_sync = "last"                unsharded gradients accumulate until the last micro-batch

With HSDP (fsdp.dp_replicate), gradients are reduce-scattered over dp_shard, then all-reduced over dp_replicate.
Both average, so together they average over all ranks, as train.py assumes.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtitan_lite.config.patterns import unused
from torchtitan_lite.config.schema import FsdpConfig
from torchtitan_lite.distributed.overrides import column_placement, dtypes_of_group
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models import Transformer


@dataclass(frozen=True)
class Group:
    """Modules whose parameters are gathered, cast and reduced together."""

    name: str  # the modules' names, e.g. "norm, output"
    modules: list[nn.Module]
    parameters: list[str]
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    output_dtype: torch.dtype | None  # None: param_dtype
    reshard_after_forward: bool | int


def groups_of(model: Transformer, config: FsdpConfig) -> list[Group]:
    """Return the groups in forward order; with tied embeddings, inputs and head come last.

    Raises:
        ConfigError: a precision override matches nothing, or only a part of a group.
    """
    chain = _chain(model, config.blocks_per_group)
    names = {module: name for name, module in model.named_modules()}
    owned = {id(p): name for name, p in model.named_parameters()}
    groups = []
    wrong = []
    for modules in chain:
        parameters = list(dict.fromkeys(owned[id(p)] for module in modules for p in module.parameters()))
        # True frees the parameters after forward (ZeRO-3), False keeps them for backward (ZeRO-2), and N reshards them
        # over N neighbours. The head stays gathered, because backward starts with it. FSDP2 has the same rule for the
        # root, but our root has no parameters.
        reshard = config.reshard_after_forward
        if reshard == "default" or (not isinstance(reshard, bool) and modules is chain[-1]):
            reshard = modules is not chain[-1]
        try:
            dtypes = dtypes_of_group(", ".join(names[m] for m in modules), parameters, config)
        except ConfigError as error:
            wrong.append(str(error))
            continue
        if model.output in modules and model.output.chunked:
            dtypes = (*dtypes[:2], None)  # its output is the loss, which stays float32
        groups.append(Group(", ".join(names[m] for m in modules), modules, parameters, *dtypes, reshard))
    wrong += unused("fsdp.precision_overrides", list(owned.values()), [o.match for o in config.precision_overrides])
    if wrong:
        raise ConfigError("\n  ".join(wrong))
    return groups


def _chain(model: Transformer, size: int) -> list[list[nn.Module]]:
    """Return each group's modules in forward order: up to `size` blocks of a stack; tied inputs join the head."""
    blocks, layers, head = model.block_groups(), [], [model.norm, model.output]
    for n in model.config.stacks:
        stack, blocks = blocks[:n], blocks[n:]
        layers += [[module for block in stack[i : i + size] for module in block] for i in range(0, n, size)]
    after_input = {model.layers, *head, *(module for group in layers for module in group)}
    inputs = [m for m in model.children() if m not in after_input and any(True for _ in m.parameters())]
    return [*layers, inputs + head] if model.config.tie_embeddings else [inputs, *layers, head]


def apply_fsdp(model: Transformer, mesh: DeviceMesh, config: FsdpConfig) -> None:
    """Shard a model on the meta device over the mesh, in place, and set up prefetching.

    Raises:
        ConfigError: see `groups_of` and `column_placement`.
    """
    # param_dtype applies to gathered parameters; shards, and so the optimizer, stay float32. Without a reduce_dtype,
    # FSDP2 would sum gradients over ranks in param_dtype: a bfloat16 sum drops addends below 1/256 of it.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype),
        reduce_dtype=getattr(torch, config.reduce_dtype),
        cast_forward_inputs=config.cast_forward_inputs,  # False by default: see _cast_first
    )
    offload = CPUOffloadPolicy(pin_memory=config.pin_memory) if config.cpu_offload else OffloadPolicy()
    groups = groups_of(model, config)
    placement = column_placement(model, config.shard_columns, mesh.shape[-1])
    with contextlib.ExitStack() as sharing:
        if type(config.reshard_after_forward) is int:
            from torchtitan_lite.distributed.post_forward import one_mesh

            sharing.enter_context(one_mesh())
        for group in groups:
            mp_policy = replace(
                policy,
                param_dtype=group.param_dtype,
                reduce_dtype=group.reduce_dtype,
                output_dtype=group.output_dtype,
            )
            fully_shard(
                group.modules,
                mesh=mesh,
                reshard_after_forward=group.reshard_after_forward,
                shard_placement_fn=placement,
                mp_policy=mp_policy,
                offload_policy=offload,
            )
    # The root would own parameters outside all groups; here there are none. But its first forward makes the groups
    # share streams and buffers, its backward ends by waiting for their reduce-scatters, and its setters (as in
    # before_micro_batch) reach all groups. It takes token ids and returns a float32 loss: nothing to cast.
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, cast_forward_inputs=False), offload_policy=offload)
    if not model.config.tie_embeddings:
        _fsdp(model.tok_embeddings).set_unshard_in_backward(False)  # a lookup's gradient needs no table
    if len({group.param_dtype for group in groups}) > 1 or any(group.output_dtype for group in groups):
        for group in groups:
            for module in group.modules:
                module.register_forward_pre_hook(functools.partial(_cast_first, group.param_dtype))
    if config.separate_reduce_scatter_group:
        _fsdp(model).set_separate_reduce_scatter_group()
    if config.reduce_scatter_buffers > 1:
        _fsdp(model).set_reduce_scatter_max_input_buffers(config.reduce_scatter_buffers)
    if config.explicit_prefetching:
        chain = [_fsdp(group.modules[0]) for group in groups]  # the modules of a group share one state
        _set_prefetch(chain, config, model.config.tie_embeddings, mesh.device_type)


def _cast_first(dtype: torch.dtype, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast the activations that come from a group with a different dtype.

    `cast_forward_inputs` would also cast the other arguments, but rotary tables must stay float32.
    """
    first, *others = args
    return (first.to(dtype) if first.is_floating_point() else first, *others)


def _set_prefetch(chain: list[FSDPModule], config: FsdpConfig, tied: bool, device_type: str) -> None:
    """Set up prefetching: gather forward_prefetch groups ahead in forward, and backward_prefetch ahead in backward.

    FSDP2's default gathers each group when forward reaches it; on CUDA this still overlaps, as the host runs ahead of
    the device. In backward it gathers one group ahead, in reverse forward order. A non-empty
    list set here replaces this default and does not add to it. Each group gathered ahead is one more unsharded group in
    memory.
    """
    # the tied group is gathered first and stays gathered for the head
    forward_chain = [chain[-1], *chain[:-1]] if tied else chain
    for i, module in enumerate(forward_chain):
        module.set_modules_to_forward_prefetch(forward_chain[i + 1 : i + 1 + config.forward_prefetch])
    for i, module in enumerate(chain):
        # untied embeddings are listed, too: with unshard_in_backward off, this gathers nothing
        module.set_modules_to_backward_prefetch(chain[max(i - config.backward_prefetch, 0) : i][::-1])
        if device_type == "cpu":
            # otherwise gloo's all-gather ends before the computation begins, and nothing overlaps
            module._set_unshard_async_op(True)


# --- in the loop ------------------------------------------------------------------------------------------------


def unshard_first(model: Transformer) -> None:
    """Start the first group's all-gather early. (`model.unshard()` gathers only the root's parameters: none.)"""
    _fsdp(model.tok_embeddings).unshard(async_op=True)


def before_micro_batch(model: nn.Module, config: FsdpConfig, *, last: bool) -> None:
    """Set whether the next backward reduces gradients and reshards; `last`: the step's last micro-batch."""
    root = _fsdp(model)
    if config.grad_sync == "last":
        root.set_requires_gradient_sync(last)
    elif config.grad_sync == "all_reduce_last":
        root.set_requires_all_reduce(last)
    if not config.reshard_after_backward:
        # the optimizer step makes gathered parameters stale
        root.set_reshard_after_backward(last)


@contextlib.contextmanager
def evaluating(model: nn.Module, *, compiled: bool = False) -> Iterator[None]:
    """Switch to evaluation mode; afterwards, back to training mode with resharded parameters.

    Args:
        compiled: use compiled blocks, which recompile for each length.
    """
    model.eval()
    with contextlib.nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
        yield
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
