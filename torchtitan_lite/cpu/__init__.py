"""Faster functions for CPUs, each with a key in [speed]. A model's names, shapes and checkpoints stay the same.

Models use plain functions. `apply` replaces some of them on a built model (train.py has the table), before activation
checkpointing, compilation and `fully_shard`. A replacement falls back to the plain function where that is as fast, e.g.
for long sequences.
"""

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import SpeedConfig
from torchtitan_lite.cpu import attention, fused, loss
from torchtitan_lite.cpu.shared_memory import apply_shared_memory
from torchtitan_lite.cpu.widen import use_float32_matmuls, widens
from torchtitan_lite.models import Transformer
from torchtitan_lite.models import attention as plain

__all__ = ["apply", "apply_shared_memory", "widens"]


def apply(model: Transformer, config: SpeedConfig, *, widen: bool = False) -> None:
    """Replace a model's functions by faster ones.

    Args:
        widen: compute 16-bit matmuls in float32; see `widens`.
    """
    if config.block_attention:
        for module in model.modules():
            if getattr(module, "attend", None) is plain.attend:
                module.attend = attention.attend  # type: ignore[assignment]
    if config.fused_functions and FAMILIES[model.config.family].fused_functions:
        fused.fuse_norms(model)
        fused.fuse_rotations(model)
    model.output.cross_entropy = loss.chunked_cross_entropy  # where model.output.chunked is set
    if widen:
        use_float32_matmuls(model)
