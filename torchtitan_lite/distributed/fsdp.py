"""FSDP2 applied from outside: the model files do not import it. docs/fsdp.md describes each option.

Parameters are gathered in groups, in the order of forward:

    inputs (token and position embeddings) -> layers.0 -> ... -> layers.L-1 -> head (norm, output)

fsdp.blocks_per_group puts several blocks into one group. A parameter belongs to one group, so tied inputs and head are
one, the first, which stays gathered through forward.

Between uses a parameter is a DTensor: each rank has some of its rows, in float32. In a micro-batch, each group does
this, so only the group in use and prefetched groups are gathered:

    forward     all-gather, in param_dtype; compute; free, unless reshard_after_forward is False
    backward    all-gather again, if freed; compute; free; reduce-scatter the gradients, in reduce_dtype

Exceptions:

    the head                          not freed after forward, unless reshard_after_forward is True: backward begins
                                      with it (although with speed.chunked_loss, backward needs only the norm)
    untied embeddings                 not gathered for backward
    reshard_after_backward = false    not freed after backward, so the next micro-batch's forward gathers nothing
    grad_sync = "last"                unsharded gradients accumulate until the last micro-batch

The dtype of each tensor follows from the group's policy, except where a line of code says float32:

    dtype                         default   --mixed-precision  float16   float8 (with bfloat16)
    parameter, this rank's rows   float32   float32            float32   float32
    gathered parameter            float32   bfloat16           float16   float8_e4m3fn
    residual stream               float32   bfloat16           float16   bfloat16
    rotary tables, rotation       float32   float32            float32   float32
    queries, keys, values         float32   bfloat16           float16   bfloat16
    logits                        float32   bfloat16           float16   bfloat16
    loss                          float32   float32            float32   float32
    gradient of gathered          float32   bfloat16           float16   bfloat16
    reduction                     float32   float32            float32   float32
    gradient, this rank's rows    float32   float32            float32   float32
    moments, momentum             float32   float32            float32   float32
    Muon's iteration on a CPU     float32   float32            float32   float32
    Muon's iteration on a GPU     bfloat16  bfloat16           bfloat16  bfloat16

Matmuls, norms and softmax sum in float32, then round to the dtype of their inputs; on a CPU, block attention also
rounds the scores before its softmax. Micro-batches accumulate into this rank's rows, so in float32. The gradient norm
is a float64 sum over ranks. With speed.float8, only the blocks' linear layers are in float8 (inputs and weights in
e4m3, gradients of outputs in e5m2); the rest is as with --mixed-precision.

With HSDP (fsdp.dp_replicate), gradients are reduce-scattered over dp_shard, then all-reduced over dp_replicate.
Both sum (`averaged_over`).
"""

from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from torchtitan_lite.config.schema import FsdpConfig
from torchtitan_lite.distributed.overrides import cast_inputs, column_placement, dtypes_of, one_post_forward_mesh
from torchtitan_lite.models import Transformer


@dataclass(frozen=True)
class Group:
    """Modules whose parameters are gathered, cast and reduced together."""

    name: str  # the modules' names, e.g. "norm, output"
    modules: list[nn.Module]
    parameters: list[str]
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    output_dtype: torch.dtype | None  # None: not cast
    reshard_after_forward: bool | int


def groups_of(model: Transformer, config: FsdpConfig) -> list[Group]:
    """Return the groups in the order of forward. With tied embeddings, inputs and head are one group, the first."""
    blocks, layers, size = model.block_groups(), list[list[nn.Module]](), config.blocks_per_group
    for n in model.config.stacks:  # a group has blocks of one stack
        stack, blocks = blocks[:n], blocks[n:]
        layers += [[*chain(*stack[i : i + size])] for i in range(0, n, size)]
    head = [model.norm, model.output]
    others = {model.layers, *head, *chain(*layers)}
    inputs = [m for m in model.children() if m not in others and any(True for _ in m.parameters())]
    names = {module: name for name, module in model.named_modules()}
    owned = {id(p): name for name, p in model.named_parameters()}  # a tied weight has one name
    groups = []
    for modules in [inputs + head, *layers] if model.config.tie_embeddings else [inputs, *layers, head]:
        parameters = list(dict.fromkeys(owned[id(p)] for module in modules for p in module.parameters()))
        param_dtype, reduce_dtype, output_dtype = dtypes_of(parameters[0], config)
        reshard, has_head = config.reshard_after_forward, model.output in modules
        if has_head and model.output.chunked:
            output_dtype = None  # its output is the loss, which stays float32
        # True frees the parameters after forward (ZeRO-3), False keeps them for backward (ZeRO-2), N reshards them over
        # N neighbours. Backward begins with the head, so by default the head stays gathered.
        if reshard == "default" or (has_head and not isinstance(reshard, bool)):
            reshard = not has_head
        name = ", ".join(names[module] for module in modules)
        groups.append(Group(name, modules, parameters, param_dtype, reduce_dtype, output_dtype, reshard))
    return groups


def apply_fsdp(model: Transformer, mesh: DeviceMesh, config: FsdpConfig) -> None:
    """Shard a model on the meta device over the mesh, in place, and set up prefetching."""
    groups = groups_of(model, config)
    placement = column_placement(model, config.shard_columns, mesh.shape[-1])
    offload = CPUOffloadPolicy(pin_memory=config.pin_memory) if config.cpu_offload else OffloadPolicy()
    with one_post_forward_mesh(config.reshard_after_forward):
        for group in groups:
            fully_shard(
                group.modules,
                mesh=mesh,
                reshard_after_forward=group.reshard_after_forward,
                shard_placement_fn=placement,
                mp_policy=MixedPrecisionPolicy(
                    group.param_dtype, group.reduce_dtype, group.output_dtype, config.cast_forward_inputs
                ),
                offload_policy=offload,
            )
    # The root owns only what an own model registers on itself, and casts nothing. But its first forward makes groups
    # share streams and buffers, its backward ends by waiting for their reduce-scatters, and its setters reach all.
    root = fully_shard(model, mesh=mesh)
    if not model.config.tie_embeddings:
        _fsdp(model.tok_embeddings).set_unshard_in_backward(False)  # a lookup's gradient needs no table
    if len({group.param_dtype for group in groups}) > 1 or any(group.output_dtype for group in groups):
        for group in groups:
            cast_inputs(group.modules, group.param_dtype)
    divisor = averaged_over(config, mesh.size())
    for module in (root, *(_fsdp(group.modules[0]) for group in groups)):  # these setters do not reach other groups
        module.set_force_sum_reduction_for_comms(True)
        if divisor != mesh.size():  # the default; in a world of one, setting it would cost a copy
            module.set_gradient_divide_factor(divisor)
        if config.comm_memory == "pool":
            module.set_allocate_memory_from_process_group_for_comm(True)
        elif config.comm_memory == "symmetric":
            module.set_symm_mem_for_comm()
    if config.separate_reduce_scatter_group:
        root.set_separate_reduce_scatter_group()
    if config.reduce_scatter_buffers > 1:
        root.set_reduce_scatter_max_input_buffers(config.reduce_scatter_buffers)
    if config.explicit_prefetching:
        _set_prefetch(groups, config, mesh.device_type, tied=model.config.tie_embeddings)


def averaged_over(config: FsdpConfig, ranks: int) -> int:
    """Return the number that FSDP2 divides summed gradients by: 1, or with float16 the number of ranks.

    The gradient of the mean loss per token is a plain sum over the ranks, which NCCL can also compute in the switch and
    without copies. (FSDP2's default is `ReduceOp.AVG`, which it can't.) In float16, each rank's part of the mean could
    vanish. So there the loss is larger by the number of ranks (`GradScaler`), and FSDP2 divides by it, partly before a
    sum in float16, which could overflow.
    """
    return ranks if config.uses_float16 else 1


def _set_prefetch(groups: list[Group], config: FsdpConfig, device_type: str, *, tied: bool) -> None:
    """Gather forward_prefetch groups ahead in forward, and backward_prefetch ahead in backward.

    FSDP2's default gathers each group when forward reaches it (on CUDA this overlaps, as the host runs ahead of the
    device), and in backward one group ahead. Each group gathered ahead is one more unsharded group in memory.
    """
    forward = [_fsdp(group.modules[0]) for group in groups]  # the modules of a group share one state
    # backward begins with the head; untied embeddings are listed too, but are not gathered
    backward = [forward[0], *forward[:0:-1]] if tied else forward[::-1]
    for i in range(len(groups)):
        forward[i].set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + config.forward_prefetch])
        backward[i].set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + config.backward_prefetch])
        if device_type == "cpu":
            # otherwise gloo's all-gather ends before the computation begins, and nothing overlaps
            forward[i]._set_unshard_async_op(True)


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


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
