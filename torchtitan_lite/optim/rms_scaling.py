"""AdamW with the rate of each parameter multiplied by that parameter's root mean square, as Adafactor does.

The update of a parameter p is that of AdamW at the rate lr * max(0.001, RMS(p)). So all parameters change by the same
share of their size, whatever their initial values, and rates around 0.01 are usual (nanoT5's AdamW, Nawrot 2023; the
scaling is Adafactor's, Shazeer and Stern 2018). Weight decay is that of AdamW: lr * weight_decay, not scaled.

The RMS is that of the whole parameter, before the step. A rank knows the sum of squares of its rows, so one all-reduce
of a number for each parameter, over the ranks that share a copy of the model, is all that is exchanged.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_lite.config.schema import OptimConfig
from torchtitan_lite.distributed.sharding import local_rows
from torchtitan_lite.optim.guarded import AdamW
from torchtitan_lite.optim.muon import ranks_of

LEAST = 1e-3  # Adafactor's eps2: a parameter that is zero has to leave it

# The fused kernel with a tensor as rate has no shape function (torch 2.11 to 2.13), so `plan`, which simulates a step
# without memory, would run it on real tensors. It changes its arguments in place and returns nothing.
_SHAPES = torch.library.Library("aten", "IMPL", "Meta")
try:
    _meta: dict[str, Any] = {"lr": torch.empty((), device="meta"), "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adamw_(*([], [], [], [], [], []), **_meta, beta1=0.9, beta2=0.9, amsgrad=False, maximize=False)
except NotImplementedError:
    _SHAPES.impl("_fused_adamw_.tensor_lr", lambda *_, **__: None)


class ScaledAdamW(AdamW):
    """Fused AdamW at the rate lr * max(LEAST, RMS(p)) for each parameter p.

    The state is that of AdamW.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig) -> None:
        super().__init__(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        scales = rms([p for group in self.param_groups for p in group["params"] if p.grad is not None])
        for group in self.param_groups:
            n = sum(p.grad is not None for p in group["params"])
            if n:
                self._update(group, scales[:n].clamp(min=LEAST))
            scales = scales[n:]

    def _update(self, group: dict[str, Any], scales: Tensor) -> None:
        """Update the parameters of a group; `scales` has one number for each."""
        lists: list[list[Tensor]] = [[], [], [], [], [], []]
        self._init_group(group, *lists)
        parameters, gradients, means, squares, _, steps = lists
        decay = 1 - group["lr"] * group["weight_decay"]
        torch._foreach_add_(steps, 1)
        if self.found_inf is not None:
            torch._foreach_sub_(steps, [self.found_inf] * len(steps))
            decay = torch.where(self.found_inf != 0, 1.0, decay)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, decay)
        beta1, beta2 = group["betas"]
        for i, rate in enumerate((group["lr"] * scales).unbind()):
            if parameters[i].numel():  # of few rows, some ranks have none
                torch._fused_adamw_(
                    *([parameters[i]], [gradients[i]], [means[i]], [squares[i]], [], [steps[i]]),
                    lr=rate,
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=0.0,
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                    grad_scale=self.grad_scale,
                    found_inf=self.found_inf,
                )


def rms(parameters: list[nn.Parameter]) -> Tensor:
    """The root mean squares of whole parameters, (n,) float32. Collective, with one all-reduce for all of them."""
    norms = torch._foreach_norm([local_rows(p.detach())[0] for p in parameters])
    # divided by numbers: a tensor of the sizes would make the host wait for the device
    shares = torch._foreach_div(norms, [p.numel() ** 0.5 for p in parameters])
    squares = torch.stack(shares).double().square()
    if (group := ranks_of(parameters[0])[0]) is not None:
        dist.all_reduce(squares, group=group)
    return squares.sqrt().float()
