"""The guard against loss spikes, on the device. Loaded only if [spike] asks for it.

A loss or gradient norm is a spike if it is far above the median of the last `window` steps, measured in deviations. The
comparison runs on the device, with limits that the host computes from steps it has read already. So no step waits, and
FiniteGuard withholds the update of a spike as it does that of a step that is not finite. The host reads the result one
step later.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_lite.config.schema import SpikeConfig
from torchtitan_lite.optim.finite_guard import HostCopy

_MAD = 1.4826  # times the median absolute deviation is the standard deviation of a normal distribution
_LEAST = 0.02  # of the median: a deviation of equal values would be 0


class Spike(NamedTuple):
    """A step whose loss or gradient norm is above its limit; None: it has no limit."""

    loss: float
    grad_norm: float
    loss_limit: float | None
    norm_limit: float | None

    def __str__(self) -> str:
        values = ("loss", self.loss, self.loss_limit), ("gradient norm", self.grad_norm, self.norm_limit)
        above = ((name, value, limit) for name, value, limit in values if limit is not None and value > limit)
        return ", ".join(f"{name} {value:.4f} above {limit:.4f}" for name, value, limit in above)


def limit(values: Sequence[float], window: int, deviations: float) -> float:
    """A value above this is a spike; infinite while there are less than `window` values."""
    if len(values) < window or not deviations:
        return math.inf
    values = values[-window:]  # a resume may have made it shorter
    median = statistics.median(values)
    deviation = _MAD * statistics.median(abs(value - median) for value in values)
    return median + deviations * max(deviation, _LEAST * abs(median))


class SpikeGuard:
    """Compares each step with the window. All ranks have equal values, and come to the same result."""

    def __init__(self, config: SpikeConfig, warmup_steps: int, window: Mapping[str, Sequence[float]]) -> None:
        """
        Args:
            window: from TrainState: `window` as it was saved.
        """
        self._config, self._warmup_steps = config, warmup_steps
        # the losses and gradient norms of the last steps; those whose update was withheld are not among them
        self.window = {key: list(window.get(key, ())) for key in ("losses", "norms")}
        self._limits = math.inf, math.inf
        self._pending: HostCopy | None = None

    def suspect(self, step: int, loss: Tensor, grad_norm: Tensor) -> Tensor | None:
        """Compare a step, without waiting. Call `check` for the previous step first.

        Args:
            loss, grad_norm: () float32, of the global batch.

        Returns:
            () bool for FiniteGuard.update; None if the update is applied anyway.
        """
        c = self._config
        self._limits = math.inf, math.inf
        if step > self._warmup_steps:
            losses, norms = self.window.values()
            self._limits = limit(losses, c.window, c.loss_deviations), limit(norms, c.window, c.norm_deviations)
        flag = (loss.double() > self._limits[0]) | (grad_norm.double() > self._limits[1])
        self._pending = HostCopy(torch.stack([loss, grad_norm, flag.float()]))
        return None if c.action == "log" else flag

    def check(self) -> Spike | None:
        """The last step, once, if it was a spike. Steps that are not finite are FiniteGuard's."""
        if self._pending is None:
            return None
        loss, grad_norm, flag = self._pending.read()
        self._pending = None
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return None
        if self._config.action == "log" or not flag:
            for values, value in zip(self.window.values(), (loss, grad_norm), strict=True):
                values[:] = [*values, value][-self._config.window :]
        if not flag:
            return None
        loss_limit, norm_limit = (value if math.isfinite(value) else None for value in self._limits)
        return Spike(loss, grad_norm, loss_limit, norm_limit)
