"""Faster implementations for CPUs. Names, shapes and checkpoints of a model stay the same; each has a key in [speed].

The models hold plain functions. `apply` replaces some on a built model (train.py has the table), before activation
checkpointing, compilation and `fully_shard`. A new one falls back to the plain one where that is as fast, e.g. for long
sequences. What not every run needs (widened.py, shared_memory.py) is imported where it is used.
"""

from torch.distributed.device_mesh import DeviceMesh

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.config.schema import Config, SpeedConfig
from torchtitan_lite.cpu import attention, fused, loss
from torchtitan_lite.distributed.process_group import World
from torchtitan_lite.models import Transformer
from torchtitan_lite.models import attention as plain
from torchtitan_lite.process import env_int


def widens(config: Config, world: World) -> bool:
    """Whether 16-bit products are computed in float32. The first call is a collective."""
    dtypes = config.fsdp.dtypes("param_dtype") - {None, "float32"}
    if not dtypes or not config.speed.widened_products or world.device.type != "cpu":
        return False
    from torchtitan_lite.cpu import widened

    return not dtypes.isdisjoint(widened.slow_on_rank0())


def apply(model: Transformer, config: SpeedConfig, *, widen: bool = False) -> None:
    """Replace functions of a model by faster ones.

    Args:
        widen: compute 16-bit products in float32; see `widens`.
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
        from torchtitan_lite.cpu import widened

        widened.widen(model)


def apply_shared_memory(model: Transformer, mesh: DeviceMesh) -> None:
    """Use shared memory for a sharded model's collectives, if several ranks are all on the CPU of one machine."""
    if mesh.size() > 1 and mesh.device_type == "cpu" and env_int("LOCAL_WORLD_SIZE", 1) == mesh.size():
        from torchtitan_lite.cpu import shared_memory

        shared_memory.apply(model, mesh)
