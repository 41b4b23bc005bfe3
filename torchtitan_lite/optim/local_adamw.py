"""AdamW without DTensor's dispatch."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class AdamW(torch.optim.AdamW):
    """AdamW on each rank's shards. The update is elementwise, so a step can bypass DTensor, whose first call of each
    operator is slow. The state still consists of DTensors.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return has_complex
