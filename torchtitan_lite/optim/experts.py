"""Router biases, which balance the loads of experts (models/experts.py)."""

from typing import Any

import torch
import torch.distributed as dist

from torchtitan_lite.distributed.process_group import sum_over_ranks
from torchtitan_lite.optim.guarded import GuardedOptimizer


@torch.no_grad()
def balance(model: Any, optimizer: GuardedOptimizer, *_: object) -> None:
    """Move the router biases of experts by the loads of a step, summed over the ranks."""
    if model.loads is not None and model.config.router_bias:
        loads = model.loads.double()
        if dist.is_initialized():
            sum_over_ranks(loads)
        model.balance(loads, optimizer.found_inf)
    model.loads = None
