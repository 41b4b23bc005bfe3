"""The optimizer interface that a training step needs, and torch's AdamW and SGD with this interface."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_lite.distributed.sharding import own_part


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose update can be withheld on the device, without waiting for the host.

    `update` sets these before each `step`, which must obey them, as torch's fused AdamW does:

        found_inf    () float32; 1: parameters and state do not change. None: 0
        grad_scale   () float32; the update divides the gradients by it. None: 1
        step_number  the number of steps before this one, including withheld ones
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    # () float32 by parameter: the norm of this rank's part of its last update, if `update` measured it
    update_norms: dict[nn.Parameter, Tensor] | None = None

    @property
    def step_number(self) -> int:
        return int(self.param_groups[0].get("step_number", 0))

    @step_number.setter
    def step_number(self, number: int) -> None:
        for group in self.param_groups:  # optim/average.py reads it
            group["step_number"] = number

    def update(self, step: int, lr: float, factor: Tensor, withheld: Tensor, *, measure: bool = False) -> None:
        """Apply a step's gradients, and free them. Does not wait for the device.

        Args:
            step: 1-based.
            lr: each group's learning rate is lr times its lr_factor.
            factor: () float32, which unscales and clips: the gradients are multiplied by it.
            withheld: () bool; if true, neither parameters nor state change.
            measure: set `update_norms`; empty if this optimizer can't. (Those of a withheld update mean nothing.)
        """
        set_learning_rate(self, lr)
        device = self.param_groups[0]["params"][0].device  # the host with cpu_offload
        self.found_inf, self.step_number = withheld.float().to(device), step - 1
        self.multiply_gradients(factor.to(device))
        measured: dict[nn.Parameter, Tensor] = {}
        self.update_norms = measured if measure else None
        self.step()
        for group in self.param_groups if measure else ():
            unknown = [p for p in group["params"] if p.grad is not None and p not in measured]
            measured.update((p, norm) for p in unknown if (norm := self.norm_of_update(p, group)) is not None)
        self.zero_grad()

    def norm_of_update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor | None:
        """Return the norm of this rank's part of a parameter's last update, () float32; None if unknown."""
        return None

    def multiply_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients by () float32 in the next `step`, which saves a pass over them."""
        self.grad_scale = 1 / factor


class AdamW(GuardedOptimizer, torch.optim.AdamW):
    """Fused AdamW on each rank's shards.

    The update is elementwise, so it can bypass DTensor, whose first call of each operator is slow. The state still
    consists of DTensors.
    """

    # Private: torch's step calls it for each group to fill six empty lists: parameters, gradients, first and second
    # moments, maxima of second moments (amsgrad), step counts. The update then works in place on the tensors in the
    # lists. If torch stops calling it, the update works on DTensors.
    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        has_complex: bool = torch.optim.AdamW._init_group(self, group, *lists)
        for tensors in lists:
            tensors[:] = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return has_complex

    @torch.no_grad()
    def norm_of_update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        """Compute it from the moments, with the memory of two copies of this part."""
        state, lr, decay = self.state[parameter], group["lr"], group["weight_decay"]
        mean, root = (
            own_part(state[key])[0] / (1 - beta ** state["step"])
            for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
        )
        update = mean.div_(root.sqrt_().add_(group["eps"])).add_(own_part(parameter)[0], alpha=decay)
        return update.norm() * (lr / (1 - lr * decay))  # of the weight before: this one has decayed already


class HostGuarded(GuardedOptimizer):
    """Adds guarding to any torch optimizer: `class RMSprop(HostGuarded, torch.optim.RMSprop)`.

    The host waits for the device to learn whether the update is withheld, and scaling the gradients takes an extra
    pass.
    """

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self.found_inf is not None and self.found_inf:  # waits for the device
            return None
        found_inf, self.found_inf = self.found_inf, None  # torch's unfused steps reject it
        loss = super().step(closure)
        self.found_inf = found_inf
        return loss

    def multiply_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients by () float32 now."""
        parameters = (p for group in self.param_groups for p in group["params"])
        torch._foreach_mul_([own_part(p.grad)[0] for p in parameters if p.grad is not None], factor)


class SGD(HostGuarded, torch.optim.SGD):
    """Unfused: the fused SGD rejects DTensors and rounds differently."""

    def norm_of_update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        return own_part(self.state[parameter]["momentum_buffer"])[0].norm() * float(group["lr"])


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set each group's learning rate to `rate` times its lr_factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"]
