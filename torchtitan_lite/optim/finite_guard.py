"""What guards an update: a guard withholds it on the device. FiniteGuard does if it is not finite.

Where `optimizer.found_inf` is 1, a step changes nothing. The host reads the record during the next step, so a healthy
run never waits. spike_guard.py has another guard.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torchtitan_lite.errors import NonFiniteError, UserError
from torchtitan_lite.optim.grad_scaler import GradScaler
from torchtitan_lite.optim.step_record import StepRecord

MIN_SCALE = 1.0  # float16: an overflow with a loss scale below it stops the run


class Incident(NamedTuple):
    """What a guard has found in a step."""

    record: dict[str, Any]  # for metrics.jsonl
    line: str  # for the log
    error: UserError | None = None  # raised on every rank


class Guard(Protocol):
    """Decides about the update of each step. All ranks have equal records, and come to the same result."""

    def withholds(self, record: StepRecord) -> Tensor:
        """() bool on the device: whether the update is withheld. `check` was called for the step before."""

    def check(self, record: StepRecord) -> Incident | None:
        """What this means, once it is on the host.

        Raises:
            UserError: on every rank: the run stops.
        """

    def state(self) -> Mapping[str, Any]:
        """Its part of the TrainState, for a checkpoint."""


def too_many(skipped: list[int], most: int) -> bool:
    """Whether the last of these steps are more than `most` in a row."""
    return skipped[-most - 1 :] == list(range(skipped[-1] - most, skipped[-1] + 1))


class FiniteGuard:
    """Withholds an update if a rank's loss or the gradient norm is not finite.

    With float16, infinite gradients of a finite loss are an overflow: the step is counted, and the loss scale is
    halved. Without float16 they are an error.
    """

    def __init__(self, scaler: GradScaler, skipped: list[int], max_skipped: int = 0) -> None:
        """
        Args:
            skipped: the steps whose updates the guards of this run have withheld, without float16's overflows.
            max_skipped: this many steps in a row may be skipped; one more is an error.
        """
        self._scaler, self._skipped, self._max_skipped = scaler, skipped, max_skipped

    def withholds(self, record: StepRecord) -> Tensor:
        return ~record.finite

    def check(self, record: StepRecord) -> Incident | None:
        numbers, step = record.numbers, record.step
        ranks = [str(rank) for rank, loss in enumerate(numbers.rank_losses) if not math.isfinite(loss)]
        if not ranks and math.isfinite(numbers.grad_norm):
            return None
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
                line = f"SKIPPED step {step}: not finite; run samples {first} to {end - 1}"
                return Incident({"skipped_samples": [first, end]}, line)
        raise NonFiniteError(
            f"step {step}: {what}. The update was withheld, and nothing has been saved since. "
            "A lower optim.lr, more optim.warmup_steps or a smaller optim.max_norm may help"
        )

    def state(self) -> Mapping[str, Any]:
        return {"skipped": [*self._skipped]}
