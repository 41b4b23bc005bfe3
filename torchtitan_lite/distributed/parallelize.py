"""FSDP2 applied from outside: the model files do not import it. docs/fsdp.md describes each option.

Parameters are gathered in groups, in the order of forward:

    inputs (token and position embeddings) -> layers.0 -> ... -> layers.L-1 -> head (norm, output)

fsdp.blocks_per_group puts several blocks into one. Tied inputs and head are one group, gathered throughout.

The order of application matters: activation checkpointing replaces a block's forward, compilation takes the result,
and `fully_shard` adds its hooks around both. The root comes last. It owns no parameters, but makes the groups share
streams and buffers.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan_lite.config.patterns import first_match, unused
from torchtitan_lite.config.schema import ActivationCheckpointingConfig, CompileConfig, Config, FsdpConfig, SpeedConfig
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models import Transformer

# --- activation checkpointing and compilation -------------------------------------------------------------------

# the expensive operators, whose results selective checkpointing keeps
_aten = torch.ops.aten
PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
}
FLEX_ATTENTION = ("flex_attention", "inductor_compiled_code")  # within a compiled block, and compiled by itself


def apply_activation_checkpointing(model: Transformer, config: ActivationCheckpointingConfig) -> None:
    """Checkpoint every `config.every`-th block. Its forward is replaced in place, so state dicts keep their names."""
    if config.mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.config.dropout > 0}
    if config.mode == "selective":
        # Attention with dropout shares its generator with later dropouts: recompute all of them, or none.
        kept = PRODUCTS if model.config.dropout > 0 else PRODUCTS | ATTENTION
        policy = functools.partial(_keep, kept)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    for layer in list(model.layers)[:: config.every]:
        layer.forward = _checkpointed(layer.forward, options)


def _checkpointed(forward: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    def checkpointed(*args: Tensor) -> Tensor:
        return checkpoint(forward, *args, **options)

    return checkpointed


def _keep(kept: set[Any], _context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    keep = operator in kept or operator.__name__ in FLEX_ATTENTION
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def apply_fast_paths(model: Transformer, config: SpeedConfig, *, widen: bool = False) -> None:
    """Switch to faster implementations. Names, shapes and checkpoints stay the same."""
    model.output.chunked = config.chunked_loss
    for module in model.modules():
        for name, value in (("by_blocks", config.block_attention), ("fused", config.fused_functions)):
            if hasattr(module, name):
                setattr(module, name, value)
    if widen:
        from torchtitan_lite.models import widened

        widened.widen(model)


def widens(config: Config, world: World) -> bool:
    """Whether 16-bit products are computed in float32. The first call is a collective."""
    dtypes = config.fsdp.dtypes("param_dtype") - {None, "float32"}
    if not dtypes or not config.speed.widened_products or world.device.type != "cpu":
        return False
    from torchtitan_lite.distributed.cpu_flags import slow_on_rank0

    return not dtypes.isdisjoint(slow_on_rank0())


def apply_compile(model: Transformer, config: CompileConfig) -> None:
    """Compile each block in place: names stay the same, and equal blocks are compiled once."""
    if config.enabled:
        # dtype, freezing and checkpointing make different kinds of blocks; validation doubles their number
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(model.layers))
        for layer in model.layers:
            layer.compile(backend=config.backend, fullgraph=True)


# --- sharding ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Modules whose parameters are gathered, cast and reduced together."""

    name: str  # names of the modules, e.g. "norm, output"
    modules: list[nn.Module]
    parameters: list[str]
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    output_dtype: torch.dtype | None  # None: param_dtype
    reshard_after_forward: bool | int


def groups_of(model: Transformer, config: FsdpConfig) -> list[Group]:
    """The groups in the order of forward; with tied embeddings, inputs and head come last.

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
        # The head stays gathered: backward starts with it.
        reshard = config.reshard_after_forward
        if reshard == "default" or (not isinstance(reshard, bool) and modules is chain[-1]):
            reshard = modules is not chain[-1]
        try:
            dtypes = _dtypes(", ".join(names[m] for m in modules), parameters, config)
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
    """The modules of each group, in the order of forward: up to `size` blocks of a stack; tied inputs with the head."""
    blocks, layers, head = model.block_groups(), [], [model.norm, model.output]
    for n in model.config.stacks:
        stack, blocks = blocks[:n], blocks[n:]
        layers += [[module for block in stack[i : i + size] for module in block] for i in range(0, n, size)]
    after_input = {model.layers, *head, *(module for group in layers for module in group)}
    inputs = [m for m in model.children() if m not in after_input and any(True for _ in m.parameters())]
    return [*layers, inputs + head] if model.config.tie_embeddings else [inputs, *layers, head]


def _dtypes(
    group: str, parameters: list[str], config: FsdpConfig
) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
    """param_dtype, reduce_dtype and output_dtype, which all parameters of a group share."""
    found: dict[tuple[str, str, str], str] = {}
    for name in parameters:
        dtypes = {key: getattr(config, key) for key in ("param_dtype", "reduce_dtype", "output_dtype")}
        i = first_match(name, [override.match for override in config.precision_overrides])
        if i is not None:
            dtypes |= config.precision_overrides[i].model_dump(exclude={"match"}, exclude_none=True)
        found.setdefault((dtypes["param_dtype"], dtypes["reduce_dtype"], dtypes["output_dtype"]), name)
    if len(found) > 1:
        one, other = list(found.values())[:2]
        raise ConfigError(
            f"fsdp.precision_overrides: {one} and {other} would get different dtypes, but group '{group}' is "
            f"gathered and cast together; a pattern has to match all of: {', '.join(parameters)}"
        )
    param, reduce, output = next(iter(found))
    return getattr(torch, param), getattr(torch, reduce), getattr(torch, output) if output else None


def apply_fsdp(model: Transformer, mesh: DeviceMesh, config: FsdpConfig) -> None:
    """Shard a model on the meta device over the mesh, in place, and set up prefetching.

    Raises:
        ConfigError: see `groups_of`.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype),
        reduce_dtype=getattr(torch, config.reduce_dtype),
        cast_forward_inputs=config.cast_forward_inputs,  # see casts.py
    )
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    groups = groups_of(model, config)
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
                mp_policy=mp_policy,
                offload_policy=offload,
            )
    # the root takes token ids and returns a float32 loss: nothing to cast
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, cast_forward_inputs=False), offload_policy=offload)
    if not model.config.tie_embeddings:
        _fsdp(model.tok_embeddings).set_unshard_in_backward(False)  # a lookup's gradient needs no table
    if len({group.param_dtype for group in groups}) > 1 or any(group.output_dtype for group in groups):
        from torchtitan_lite.distributed.casts import cast_inputs

        cast_inputs((module, group.param_dtype) for group in groups for module in group.modules)
    if config.explicit_prefetching:
        chain = [_fsdp(group.modules[0]) for group in groups]
        _set_prefetch(chain, config, model.config.tie_embeddings, mesh.device_type)


def _set_prefetch(chain: list[FSDPModule], config: FsdpConfig, tied: bool, device_type: str) -> None:
    """While a group computes, gather the next forward_prefetch groups, or in backward the groups before it. FSDP's
    default gathers each group when forward reaches it (on CUDA this still overlaps), and one ahead in backward."""
    # the tied group is gathered first, and still is when the head needs it
    forward_chain = [chain[-1], *chain[:-1]] if tied else chain
    for i, module in enumerate(forward_chain):
        module.set_modules_to_forward_prefetch(forward_chain[i + 1 : i + 1 + config.forward_prefetch])
    for i, module in enumerate(chain):
        module.set_modules_to_backward_prefetch(chain[max(i - config.backward_prefetch, 0) : i][::-1])
        if device_type == "cpu" and hasattr(module, "_set_unshard_async_op"):  # private: may go away
            # or gloo's all-gather ends before the computation begins that it should overlap with
            module._set_unshard_async_op(True)


# --- in the loop ------------------------------------------------------------------------------------------------


def unshard_first(model: Transformer) -> None:
    """Start the first group's all-gather early. (`model.unshard()` gathers only the root's parameters: none.)"""
    _fsdp(model.tok_embeddings).unshard(async_op=True)


def before_micro_batch(model: nn.Module, config: FsdpConfig, *, last: bool) -> None:
    """Set whether the next backward reduces gradients and reshards; `last`: of its step."""
    root = _fsdp(model)
    if config.grad_sync == "last":
        root.set_requires_gradient_sync(last)
    elif config.grad_sync == "all_reduce_last":
        root.set_requires_all_reduce(last)
    if not config.reshard_after_backward:
        # the optimizer step makes gathered parameters stale
        root.set_reshard_after_backward(last)


def reshard(model: nn.Module) -> None:
    """Reshard after a forward without a backward, so that `parameters()` are DTensors again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
