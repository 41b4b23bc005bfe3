"""`train.py --inspect`: the sharded model and its FSDP groups, before anything is allocated."""

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.schema import Config, FsdpConfig
from torchtitan_lite.distributed.parallelize import Group, groups_of
from torchtitan_lite.distributed.process_group import build_mesh, process_group
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.models import Transformer
from torchtitan_lite.tools.columns import columns

COLUMNS = "group", "parameters", "frozen", "shard MiB", "full MiB", "computes", "reduces", "reshard", "placements"
NUMBERS = range(1, 5)
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def run(config: Config, vocab_size: int, sharded_model: Callable[..., Transformer]) -> None:
    """Print the model on rank 0. `sharded_model` is that of train.py."""
    with process_group(config.run) as world:
        model = sharded_model(config, vocab_size, build_mesh(config.fsdp, world.device))
        if world.rank == 0:
            print(describe(model, config.fsdp))


def describe(model: Transformer, config: FsdpConfig) -> str:
    """The wrapped model as PyTorch prints it, and a table of its groups.

    Bytes are per rank: of its shards in float32, and of the gathered group in the dtype of the computation.
    """
    parameters = dict(model.named_parameters())
    n = sum(p.numel() for p in parameters.values())
    mine = sum(own_part(p)[0].nbytes for p in parameters.values())
    total = ("total", f"{n:,}", "", f"{mine / 2**20:.2f}", "", "", "", "", "")
    rows = [COLUMNS, *(_row(group, parameters) for group in groups_of(model, config)), total]
    return "\n".join([str(model), "", *columns(rows, NUMBERS)])


def _row(group: Group, parameters: dict[str, torch.nn.Parameter]) -> tuple[str, ...]:
    mine = [parameters[name] for name in group.parameters]
    numel = sum(p.numel() for p in mine)
    placements = sorted({str(p.placements) if isinstance(p, DTensor) else "not sharded" for p in mine})
    return (
        group.name,
        f"{numel:,}",
        f"{sum(p.numel() for p in mine if not p.requires_grad):,}",
        f"{sum(own_part(p)[0].nbytes for p in mine) / 2**20:.2f}",
        f"{numel * group.param_dtype.itemsize / 2**20:.2f}",
        SHORT[group.param_dtype] + (f" -> {SHORT[group.output_dtype]}" if group.output_dtype else ""),
        SHORT[group.reduce_dtype],
        str(group.reshard_after_forward),
        ", ".join(placements),
    )
