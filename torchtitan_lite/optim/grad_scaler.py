"""Loss scaling, so that gradients in float16 neither vanish nor overflow (Micikevicius et al., 2018).

An overflow halves the scale; `growth_interval` steps without one double it. FiniteGuard decides which steps to skip,
for all ranks and without synchronising.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.config.schema import GradScalerConfig


class GradScaler:
    """The loss scale, on the device. Does nothing without float16.

    Args:
        state: from `state_dict`; empty for a new run.
    """

    def __init__(
        self, config: GradScalerConfig, enabled: bool, device: torch.device, state: Mapping[str, Any] | None = None
    ) -> None:
        state = state or {}
        self.enabled = enabled
        self.skipped_steps = int(state.get("skipped_steps", 0))  # FiniteGuard counts them, one step late
        self._growth_interval = config.growth_interval
        # () float32, on the device; 1 without float16
        self.scale = torch.tensor(float(state.get("scale", config.init_scale)) if enabled else 1.0, device=device)
        self._good_steps = torch.tensor(int(state.get("good_steps", 0)), device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on. Gradients stay scaled until `clip_factor` unscales them."""
        return loss * self.scale if self.enabled else loss

    @torch.no_grad()
    def update(self, overflow: Tensor) -> None:
        """Adapt the scale after a step, without synchronising; `overflow` is () bool."""
        if self.enabled:
            good = torch.where(overflow, 0, self._good_steps + 1)
            grown = good >= self._growth_interval
            doubled = (self.scale * 2).clamp(max=2.0**100)  # stays finite in float32
            self.scale = torch.where(overflow, self.scale / 2, torch.where(grown, doubled, self.scale))
            self._good_steps = torch.where(grown, 0, good)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty without float16. Synchronises."""
        if not self.enabled:
            return {}
        return {
            "scale": self.scale.item(),
            "good_steps": int(self._good_steps.item()),
            "skipped_steps": self.skipped_steps,
        }
