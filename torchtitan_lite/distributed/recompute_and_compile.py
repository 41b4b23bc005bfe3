"""Activation checkpointing and compilation of each block, before sharding."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan_lite.config.schema import ActivationCheckpointingConfig, CompileConfig
from torchtitan_lite.models import Transformer

# selective checkpointing keeps the results of these expensive operators
_aten = torch.ops.aten
MATMULS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}  # float8 too: mm of torchao's tensors
ATTENTION = {
    getattr(_aten, f"_scaled_dot_product_{name}").default
    for name in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
    )
}
FLEX_ATTENTION = ("flex_attention", "inductor_compiled_code")  # within a compiled block, and compiled on its own
EXPERTS = "grouped_matmul.default"


def apply_activation_checkpointing(model: Transformer, config: ActivationCheckpointingConfig) -> None:
    """Checkpoint one block in every `config.every`. Replaces forward in place, so state dicts keep their names."""
    if config.mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.config.dropout > 0}
    if config.mode == "selective":
        # Attention with dropout shares a generator with later dropouts: recompute all of them or none.
        kept = MATMULS if model.config.dropout > 0 else MATMULS | ATTENTION
        policy = functools.partial(_keep, kept)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    for layer in list(model.layers)[:: config.every]:
        layer.forward = _checkpointed(layer.forward, options)


def _checkpointed(forward: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    def checkpointed(*args: Any, **kwargs: Any) -> Tensor:
        return checkpoint(forward, *args, **options, **kwargs)

    return checkpointed


def _keep(kept: set[Any], _context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    keep = operator in kept or operator.__name__ in (*FLEX_ATTENTION, EXPERTS)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def apply_compile(model: Transformer, config: CompileConfig, *, dynamic_shapes: bool | None = None) -> None:
    """Compile each block in place: names stay the same, and equal blocks are compiled once.

    Args:
        dynamic_shapes: compile once for sequences of any length; False: once for each length. None: torch.compile
            does the first when the length first changes, and results depend on the earlier lengths.
    """
    if config.enabled:
        # dtype, freezing, checkpointing and lengths make different kinds of blocks; validation doubles their number
        compiler = torch.compiler.config
        compiler.recompile_limit = max(compiler.recompile_limit, 16 * len(model.layers))
        for layer in model.layers:
            layer.compile(backend=config.backend, fullgraph=True, dynamic=dynamic_shapes)
