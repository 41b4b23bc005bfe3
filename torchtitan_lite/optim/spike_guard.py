"""The guard against loss spikes, on the device. Imported only if [spike] asks for it.

A loss or gradient norm is a spike if it is more than a number of stds above the median of the last `window` steps. The
std is estimated from the median absolute deviation. The comparison runs on the device, with limits that the host
computes from earlier steps. So no step waits, and a spike's update is withheld like one that is not finite. The host
reads the result one step later.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.config.schema import SpikeConfig
from torchtitan_lite.errors import SpikeError
from torchtitan_lite.optim.finite_guard import Incident, too_many
from torchtitan_lite.optim.step_record import StepRecord

_MAD = 1.4826  # std of a normal distribution / its median absolute deviation (MAD)
_LEAST = 0.02  # times the median: the smallest std, because equal values have a MAD of 0


def limit(values: Sequence[float], window: int, n_stds: float) -> float:
    """Return the value above which the next one is a spike; infinite with fewer than `window` values."""
    if len(values) < window or not n_stds:
        return math.inf
    values = values[-window:]  # a resume may have shortened the window
    median = statistics.median(values)
    std = _MAD * statistics.median(abs(value - median) for value in values)
    return median + n_stds * max(std, _LEAST * abs(median))


class SpikeGuard:
    """Compares each step with the window, and acts on spikes as spike.action says. A finite_guard.Guard."""

    def __init__(
        self,
        config: SpikeConfig,
        warmup_steps: int,
        window: Mapping[str, Sequence[float]],
        skipped: list[int],
        max_skipped: int,
        fork: Callable[[StepRecord], str],
    ) -> None:
        """
        Args:
            window: TrainState's saved `spikes`.
            skipped: as in FiniteGuard.
            max_skipped: number of consecutive steps that may be skipped.
            fork: returns the command of a run without a step's samples. Collective.
        """
        self._config, self._warmup_steps, self._fork = config, warmup_steps, fork
        self._skipped, self._max_skipped = skipped, max_skipped
        # losses and gradient norms of the last steps, without withheld ones
        self._window = {key: list(window.get(key, ())) for key in ("losses", "norms")}
        # each block's gradient norm in the same steps: an exponential mean
        self._usual = list(window.get("blocks", ()))
        self._limits = math.inf, math.inf

    def withholds(self, record: StepRecord) -> Tensor:
        c = self._config
        self._limits = math.inf, math.inf
        if record.step > self._warmup_steps:
            losses, norms = self._window.values()
            self._limits = limit(losses, c.window, c.loss_deviations), limit(norms, c.window, c.norm_deviations)
        if c.action == "log":
            return torch.zeros_like(record.finite)
        return (record.loss.double() > self._limits[0]) | (record.grad_norm.double() > self._limits[1])

    def check(self, record: StepRecord) -> Incident | None:
        loss, grad_norm, *_, norms = record.numbers
        step, action, (first, end) = record.step, self._config.action, record.samples
        if not math.isfinite(loss) or not math.isfinite(grad_norm):  # FiniteGuard handles these
            return None
        is_spike = loss > self._limits[0] or grad_norm > self._limits[1]
        pairs = zip(norms.items(), self._usual, strict=False)  # without a history there are none
        grown, block = max(((norm / usual, name) for (name, norm), usual in pairs if usual), default=(0.0, ""))
        if action == "log" or not is_spike:
            for values, value in zip(self._window.values(), (loss, grad_norm), strict=True):
                values[:] = [*values, value][-self._config.window :]
            usual, n = self._usual or norms.values(), self._config.window
            self._usual = [before + (norm - before) / n for before, norm in zip(usual, norms.values(), strict=True)]
        if not is_spike:
            return None
        measured = ("loss", loss, self._limits[0]), ("gradient norm", grad_norm, self._limits[1])
        above = ", ".join(f"{name} {x:.4f} above {most:.4f}" for name, x, most in measured if x > most)
        where = f"; largest gradient against its own mean: {block}, {grown:.1f} times" if block else ""
        what = f"{above}{where}; run samples {first} to {end - 1}"
        loss_limit, norm_limit = (value if math.isfinite(value) else None for value in self._limits)
        found = {
            **{"loss": loss, "grad_norm": grad_norm, "loss_limit": loss_limit, "norm_limit": norm_limit},
            **record.losses_of_ranks(),
            **{"samples": [first, end], "action": action},
        }
        line = f"SPIKE   step {step}: {what}{'' if action == 'log' else '; the update was withheld'}"
        error = None
        if action == "stop":
            error = SpikeError(
                f"step {step}: {what}. The update was withheld, and nothing was saved after it\n"
                f"  This command starts a run that skips these samples:\n  {self._fork(record)}"
            )
        if action == "skip":
            self._skipped.append(step)
            if too_many(self._skipped, self._max_skipped):
                error = SpikeError(
                    f"step {step}: {what}. This and the {self._max_skipped} steps before it were skipped "
                    "(train.max_skipped), and nothing has been saved since. If the loss is right, a larger "
                    "spike.loss_deviations or spike.norm_deviations accepts it; a lower optim.lr may help"
                )
        return Incident({"spike": found}, line, error)

    def state(self) -> Mapping[str, Any]:
        return {"spikes": {key: list(values) for key, values in self._window.items()} | {"blocks": [*self._usual]}}
