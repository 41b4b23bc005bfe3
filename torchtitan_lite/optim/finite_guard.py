"""Guards, which withhold bad updates on the device. FiniteGuard withholds those that are not finite.

The host reads the record during the next step, so the device always has work. spike_guard.py guards against loss
spikes.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torchtitan_lite.environment import this_command
from torchtitan_lite.errors import NonFiniteError, UserError
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.step_record import StepRecord

MIN_SCALE = 1.0  # float16: an overflow with a loss scale below this stops the run


class Incident(NamedTuple):
    """A guard's finding about a step."""

    record: dict[str, Any]  # for metrics.jsonl
    line: str  # for the log; "": neither a record nor a line
    error: UserError | None = None  # raised on every rank, to stop the run


class Guard(Protocol):
    """Decides whether to withhold each update. All ranks have equal records, and so decide the same."""

    def withholds(self, record: StepRecord) -> Tensor:
        """Return whether to withhold the update, () bool on the device. `check` has seen the previous step."""

    def check(self, record: StepRecord) -> Incident | None:
        """Read the record on the host, and return the incident, if any."""

    def state(self) -> Mapping[str, Any]:
        """Return the guard's part of the TrainState, for a checkpoint."""


def too_many(skipped: list[int], most: int) -> bool:
    """Return whether these steps end with more than `most` in a row."""
    return skipped[-most - 1 :] == list(range(skipped[-1] - most, skipped[-1] + 1))


class FiniteGuard:
    """Withholds an update if a rank's loss or the gradient norm is not finite.

    With float16, infinite gradients of a finite loss are an overflow: the step is counted, and GradScaler halves the
    loss scale. Without float16 they are an error.
    """

    def __init__(self, scaler: GradScaler, skipped: list[int], max_skipped: int = 0) -> None:
        """
        Args:
            skipped: the steps that all guards withheld in this run, without float16's overflows.
            max_skipped: number of consecutive steps that may be skipped.
        """
        self._scaler, self._skipped, self._max_skipped = scaler, skipped, max_skipped

    def withholds(self, record: StepRecord) -> Tensor:
        return ~record.finite

    def check(self, record: StepRecord) -> Incident | None:
        numbers, step = record.numbers, record.step
        ranks = [str(rank) for rank, loss in enumerate(numbers.rank_losses) if not math.isfinite(loss)]
        if not ranks and math.isfinite(numbers.grad_norm):
            return None
        bad = [name for name, norm in numbers.block_norms.items() if not math.isfinite(norm)]
        where = (
            f". In backward, the first gradient that is not finite is that of {bad[-1]}" if bad and not ranks else ""
        )
        if self._scaler.enabled and not ranks:
            self._scaler.skipped_steps += 1
            halved = numbers.loss_scale / 2
            if halved >= MIN_SCALE:
                return None
            what = f"gradients still overflow float16 with a loss scale of {halved:g}"
        else:
            what = "the gradient norm is not finite, though the loss of every rank is"
            if ranks:
                what = f"the loss is not finite on rank {', '.join(ranks)}"
            self._skipped.append(step)
            if not too_many(self._skipped, self._max_skipped):
                first, end = record.samples
                line = f"SKIPPED step {step}: not finite; run samples {first} to {end - 1}{where}"
                return Incident({"skipped_samples": [first, end]}, line)
        error = NonFiniteError(
            f"step {step}: {what}{where}. The update was withheld, and nothing has been saved since. "
            "A lower optim.lr, more optim.warmup_steps or a smaller optim.max_norm may help"
            + (
                f"\n  This command names the module where it begins:\n  {this_command(replay=str(step))}"
                if ranks
                else ""
            )
        )
        return Incident({}, "", error)

    def state(self) -> Mapping[str, Any]:
        return {"skipped": [*self._skipped]}
