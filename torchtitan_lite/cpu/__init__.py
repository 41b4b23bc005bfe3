"""Faster functions for CPUs, each with a key in [speed]. A model's names, shapes and checkpoints stay the same.

Models use plain functions. `apply` replaces some of them on a built model (train.py has the table), before activation
checkpointing, compilation and `fully_shard`. A replacement falls back to the plain function where that is as fast, e.g.
for long sequences. What not every run needs (float32_matmuls.py, shared_memory.py) is imported where it is used.
"""

from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import Config, SpeedConfig
from torchtitan_lite.cpu import attention, fused, loss
from torchtitan_lite.distributed.process_group import Process
from torchtitan_lite.environment import env_int
from torchtitan_lite.models import Transformer
from torchtitan_lite.models import attention as plain


def widens(config: Config, process: Process) -> bool:
    """Return whether to compute 16-bit matmuls in float32. The first call is a collective."""
    dtypes = config.fsdp.dtypes("param_dtype") - {None, "float32"}
    if not dtypes or not config.speed.widen_matmuls or process.device.type != "cpu":
        return False
    from torchtitan_lite.cpu.float32_matmuls import slow_on_rank0

    return not dtypes.isdisjoint(slow_on_rank0())


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
        from torchtitan_lite.cpu.float32_matmuls import use_float32_matmuls

        use_float32_matmuls(model)


def apply_shared_memory(model: Transformer, mesh: DeviceMesh) -> None:
    """Use shared memory for a sharded model's collectives, if several ranks are all on the CPU of one machine."""
    if mesh.size() > 1 and mesh.device_type == "cpu" and env_int("LOCAL_WORLD_SIZE", 1) == mesh.size():
        from torchtitan_lite.cpu import shared_memory

        shared_memory.apply(model, mesh)
