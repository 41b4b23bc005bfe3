"""FSDP2 from outside: the model's file knows nothing of it.

Groups of parameters that are gathered together, in the order of forward:

    inputs (token and position embeddings) -> layers.0 -> ... -> layers.L-1 -> head (norm, output)

Tied embeddings are a parameter of both ends, so the ends are one group, which stays whole from the first to the last.

The order matters: activation checkpointing changes a block's forward, compilation takes what it finds, and
`fully_shard` puts its hooks around both, bottom up, the root last. The root owns no parameters, but its call is needed:
it makes the groups share streams and buffers. docs/fsdp.md says what each option trades.
"""

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
from torchtitan_lite.config.schema import ActivationCheckpointingConfig, CompileConfig, FsdpConfig, SpeedConfig
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.models import Transformer

# --- activation checkpointing and compilation -------------------------------------------------------------------

# What selective checkpointing keeps: the operators that cost most to compute again.
_aten = torch.ops.aten
PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
}


def apply_activation_checkpointing(model: Transformer, config: ActivationCheckpointingConfig) -> None:
    """Have every `config.every`-th block forget its activations in forward, and compute them again in backward.

    The block's forward is replaced, not the block wrapped: names in state dicts stay as they are.
    """
    if config.mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.config.dropout > 0}
    if config.mode == "selective":
        # Attention that drops draws from the same generator as the dropouts after it: all is drawn again, or none.
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
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def apply_fast_paths(model: Transformer, config: SpeedConfig) -> None:
    """Have the model compute by the faster of two ways; names, shapes and checkpoints stay as they are."""
    model.output.chunked = config.chunked_loss
    for module in model.modules():
        for name, value in (("by_blocks", config.block_attention), ("fused", config.fused_functions)):
            if hasattr(module, name):
                setattr(module, name, value)


def apply_compile(model: Transformer, config: CompileConfig) -> None:
    """Compile each block in place: names stay as they are, and blocks of the same kind are compiled once."""
    if config.enabled:
        # Blocks of other dtypes, frozen or checkpointed, are other kinds, and validation doubles them.
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(model.layers))
        for layer in model.layers:
            layer.compile(backend=config.backend, fullgraph=True)


# --- sharding ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Modules whose parameters are gathered, cast and reduced together."""

    name: str  # of its modules, e.g. "norm, output"
    modules: list[nn.Module]
    parameters: list[str]
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    output_dtype: torch.dtype | None  # None: param_dtype
    reshard_after_forward: bool | int


def groups_of(model: Transformer, config: FsdpConfig) -> list[Group]:
    """The groups in the order of forward; tied ends come last.

    Raises:
        ConfigError: an override of the precision matches no group as a whole.
    """
    chain = _chain(model)
    names = {module: name for name, module in model.named_modules()}
    owned = {id(p): name for name, p in model.named_parameters()}
    groups = []
    wrong = []
    for modules in chain:
        parameters = list(dict.fromkeys(owned[id(p)] for module in modules for p in module.parameters()))
        # Embeddings in a group of their own are freed while the layers run. The head stays: backward starts with it.
        reshard = config.reshard_after_forward
        if reshard == "default" or (not isinstance(reshard, bool) and modules is chain[-1]):
            reshard = modules is not chain[-1]
        try:
            dtypes = _dtypes(", ".join(names[m] for m in modules), parameters, config)
        except ConfigError as error:
            wrong.append(str(error))
            continue
        if model.output in modules and model.output.chunked:
            dtypes = (*dtypes[:2], None)  # what it hands on is the loss, which stays float32
        groups.append(Group(", ".join(names[m] for m in modules), modules, parameters, *dtypes, reshard))
    patterns = [override.match for override in config.precision_overrides]
    wrong += unused("fsdp.precision_overrides", list(owned.values()), patterns)
    if wrong:
        raise ConfigError("\n  ".join(wrong))
    return groups


def _chain(model: Transformer) -> list[list[nn.Module]]:
    """The modules of each group, in the order of forward; tied ends count as the head."""
    after_input = {"layers", "norm", "output"}
    inputs = [m for name, m in model.named_children() if name not in after_input and any(True for _ in m.parameters())]
    layers = [[layer] for layer in model.layers]
    head: list[nn.Module] = [model.norm, model.output]
    return [*layers, inputs + head] if model.config.tie_embeddings else [inputs, *layers, head]


def _dtypes(
    group: str, parameters: list[str], config: FsdpConfig
) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
    """param_dtype, reduce_dtype and output_dtype of a group: the same for all of its parameters."""
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
            f"fsdp.precision_overrides: {one} and {other} would get other dtypes, and are gathered and cast together, "
            f"as parameters of {group}; patterns have to match all of these: {', '.join(parameters)}"
        )
    param, reduce, output = next(iter(found))
    return getattr(torch, param), getattr(torch, reduce), getattr(torch, output) if output else None


def apply_fsdp(model: Transformer, mesh: DeviceMesh, config: FsdpConfig) -> None:
    """Shard a model on the meta device over the mesh, in place, and wire the prefetching.

    Raises:
        ConfigError: an override of the precision matches no group as a whole.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.param_dtype),
        reduce_dtype=getattr(torch, config.reduce_dtype),
        # what a model keeps in float32 on purpose (rotary tables) must stay so; activations are cast by _cast_inputs
        cast_forward_inputs=config.cast_forward_inputs,
    )
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()
    groups = groups_of(model, config)
    for group in groups:
        fully_shard(
            group.modules,
            mesh=mesh,
            reshard_after_forward=group.reshard_after_forward,
            mp_policy=replace(
                policy,
                param_dtype=group.param_dtype,
                reduce_dtype=group.reduce_dtype,
                output_dtype=group.output_dtype,
            ),
            offload_policy=offload,
        )
    # ids and a float32 loss go in and out of the root: nothing to cast
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, cast_forward_inputs=False), offload_policy=offload)
    if not model.config.tie_embeddings:
        _fsdp(model.tok_embeddings).set_unshard_in_backward(False)  # the gradient of a lookup does not need the table
    _cast_inputs(groups)
    if config.explicit_prefetching:
        _set_prefetch(model, config.forward_prefetch, config.backward_prefetch, mesh.device_type)


def _cast_inputs(groups: list[Group]) -> None:
    """Where neighbours compute in different dtypes, have each module cast the activations that it is given.

    `cast_forward_inputs` would cast the rotary tables as well.
    """
    if len({group.param_dtype for group in groups}) == 1 and all(group.output_dtype is None for group in groups):
        return
    for group in groups:
        for module in group.modules:
            module.register_forward_pre_hook(functools.partial(_cast_first, group.param_dtype))


def _cast_first(dtype: torch.dtype, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    first, *others = args
    return (first.to(dtype) if first.is_floating_point() else first, *others)


def _set_prefetch(model: Transformer, forward: int, backward: int, device_type: str) -> None:
    """While a group computes, gather the next `forward` groups (in backward: the `backward` groups before it).

    Without these lists forward gathers each group when it is reached (on CUDA the host runs ahead, so it overlaps all
    the same), and backward one group ahead. A list replaces that default.
    """
    # One module stands for its group: the modules of a group share their FSDP state.
    chain = [_fsdp(modules[0]) for modules in _chain(model)]
    # Tied ends come first as well, and are whole when they come last.
    forward_chain = [chain[-1], *chain[:-1]] if model.config.tie_embeddings else chain
    for i, module in enumerate(forward_chain):
        module.set_modules_to_forward_prefetch(forward_chain[i + 1 : i + 1 + forward])
    for i, module in enumerate(chain):
        module.set_modules_to_backward_prefetch(chain[max(i - backward, 0) : i][::-1])
    if device_type == "cpu":
        # gloo's all-gather would otherwise end before the computation that it was issued ahead of begins (through
        # shared memory it does all the same)
        for module in chain:
            if hasattr(module, "_set_unshard_async_op"):  # private: may go away
                module._set_unshard_async_op(True)


# --- in the loop ------------------------------------------------------------------------------------------------


def unshard_first(model: Transformer) -> None:
    """Start the first group's all-gather, so that it overlaps with whatever comes before forward.

    (`model.unshard()` gathers only what the root itself owns, and here that is nothing.)
    """
    _fsdp(model.tok_embeddings).unshard(async_op=True)


def before_micro_batch(model: nn.Module, config: FsdpConfig, *, last: bool) -> None:
    """Say what the next backward does about gradients and gathered parameters; `last` of its step: everything."""
    root = _fsdp(model)
    if config.grad_sync == "last":
        root.set_requires_gradient_sync(last)
    elif config.grad_sync == "all_reduce_last":
        root.set_requires_all_reduce(last)
    if not config.reshard_after_backward:
        # the optimizer changes the shards, so what was gathered is stale after the last one
        root.set_reshard_after_backward(last)


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward left gathered, so that `parameters()` are the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _fsdp(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
