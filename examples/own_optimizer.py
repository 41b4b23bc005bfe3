"""An optimizer of your own: `train.py --optim.name=examples.own_optimizer:LION --optim.lr=1e-4` (docs/extending.md).

Lion (Chen et al., 2023) steps by the sign of the momentum. Its state takes half of AdamW's memory.
"""

from typing import Any

import torch

from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.config.sections.optim import Optimizer
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.optim.guarded import GuardedOptimizer


class Lion(GuardedOptimizer):
    """Lion. The update is elementwise, so each rank updates its own rows without communication."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig) -> None:
        super().__init__(groups, {"lr": config.lr, "betas": config.betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)  # a DTensor, like the parameter
                weight, momentum, gradient = (own_part(t)[0] for t in (parameter, state["exp_avg"], parameter.grad))
                if self.grad_scale is not None:
                    gradient = gradient / self.grad_scale
                update = momentum.lerp(gradient, 1 - beta1).sign() + group["weight_decay"] * weight
                new_weight, new_momentum = weight - group["lr"] * update, momentum.lerp(gradient, 1 - beta2)
                if self.found_inf is not None:  # skip on the device, so the host does not wait
                    new_weight = torch.where(self.found_inf != 0, weight, new_weight)
                    new_momentum = torch.where(self.found_inf != 0, momentum, new_momentum)
                weight.copy_(new_weight)
                momentum.copy_(new_momentum)


LION = Optimizer(f"{__name__}:Lion", keys=("betas",))
