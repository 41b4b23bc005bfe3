"""`train.py --inspect`: the sharded model and its FSDP groups, before anything is allocated."""

import torch
from torch.distributed.tensor import DTensor

from torchtitan_lite.config.schema import FsdpConfig
from torchtitan_lite.distributed.parallelize import Group, groups_of
from torchtitan_lite.distributed.sharding import local_rows
from torchtitan_lite.models import Transformer

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def describe(model: Transformer, config: FsdpConfig) -> str:
    """The wrapped model as PyTorch prints it, and a table of its groups.

    Bytes are per rank: of its shards in float32, and of the gathered group in the dtype of the computation.
    """
    groups = groups_of(model, config)
    parameters = dict(model.named_parameters())
    header = "group", "parameters", "frozen", "shard MiB", "full MiB", "computes", "reduces", "reshard", "placements"
    rows = [header, *(_row(group, parameters) for group in groups)]
    n = sum(p.numel() for p in parameters.values())
    mine = sum(local_rows(p)[0].nbytes for p in parameters.values())
    rows.append(("total", f"{n:,}", "", f"{mine / 2**20:.2f}", "", "", "", "", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    numbers = (1, 2, 3, 4)
    lines = [
        "  ".join(
            cell.rjust(w) if i in numbers else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([str(model), "", *(line.rstrip() for line in lines)])


def _row(group: Group, parameters: dict[str, torch.nn.Parameter]) -> tuple[str, ...]:
    mine = [parameters[name] for name in group.parameters]
    numel = sum(p.numel() for p in mine)
    placements = sorted({str(p.placements) if isinstance(p, DTensor) else "not sharded" for p in mine})
    computes = _SHORT[group.param_dtype] + (f" -> {_SHORT[group.output_dtype]}" if group.output_dtype else "")
    return (
        group.name,
        f"{numel:,}",
        f"{sum(p.numel() for p in mine if not p.requires_grad):,}",
        f"{sum(local_rows(p)[0].nbytes for p in mine) / 2**20:.2f}",
        f"{numel * group.param_dtype.itemsize / 2**20:.2f}",
        computes,
        _SHORT[group.reduce_dtype],
        str(group.reshard_after_forward),
        ", ".join(placements),
    )
