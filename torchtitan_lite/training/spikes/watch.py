"""Loss spikes: each step is compared with those before it, and logged, skipped or rewound. Loaded with [spike] only.

A loss or gradient norm is a spike if it is far above the median of the last `window` steps, measured in deviations. The
comparison runs on the device, with limits that the host computes from steps it has read already. So no step waits, and
FiniteGuard withholds the update of a spike as it does that of a step that is not finite. The host reads the result one
step later.

The window is part of TrainState, and equal on all ranks:

    losses, norms   of the last `window` steps; steps whose update was withheld are not among them
    skipped         the steps whose update was withheld
    rewinds         how often the run has gone back
    rewound_to      the step that it last went back to
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.config.schema import SpikeConfig
from torchtitan_lite.data.loader import Batch
from torchtitan_lite.errors import NonFiniteError, UserError
from torchtitan_lite.optim.finite_guard import HostCopy
from torchtitan_lite.terminal import counted
from torchtitan_lite.training.session import Session, Sums
from torchtitan_lite.training.spikes import rewind

_MAD = 1.4826  # times the median absolute deviation is the standard deviation of a normal distribution
_LEAST = 0.02  # of the median: a deviation of equal values would be 0


class SpikeError(UserError):
    """A loss or gradient norm far above those before it, once too often. That step's update was not applied."""

    exit_code = 1


def limit(values: Sequence[float], window: int, deviations: float) -> float:
    """A value above this is a spike; infinite while there are less than `window` values."""
    if len(values) < window or not deviations:
        return math.inf
    values = values[-window:]  # a resume may have made it shorter
    median = statistics.median(values)
    deviation = _MAD * statistics.median(abs(value - median) for value in values)
    return median + deviations * max(deviation, _LEAST * abs(median))


class Spikes:
    """Compares each step with the window, and acts on a spike.

    Args:
        forward_backward: train.forward_backward, for `recheck`.
    """

    def __init__(self, config: SpikeConfig, forward_backward: Callable[[Session, int, Batch], Sums]) -> None:
        self._config = config
        self._forward_backward = forward_backward
        self._rewind: tuple[dict[str, Any], list[int]] | None = None  # the record of a spike; the steps to go back to
        self._limits = math.inf, math.inf
        self._pending: HostCopy | None = None
        self._scale: Tensor | None = None  # the loss scale of the last step

    @property
    def rewinding(self) -> bool:
        """Whether the last step was a spike, and the run has to go back. Equal on all ranks."""
        return self._rewind is not None

    def suspect(self, s: Session, step: int, loss: Tensor, grad_norm: Tensor) -> Tensor | None:
        """Compare a step, without waiting. Call `check` for the previous step first.

        Args:
            loss, grad_norm: () float32, of the global batch.

        Returns:
            () bool for FiniteGuard.update; None if the update is applied anyway.
        """
        c = self._config
        losses, norms = (s.state.spikes.get(key, ()) for key in ("losses", "norms"))
        self._limits = math.inf, math.inf
        if c.action != "off" and step > s.config.optim.warmup_steps:
            self._limits = limit(losses, c.window, c.loss_deviations), limit(norms, c.window, c.norm_deviations)
        flag = (loss.double() > self._limits[0]) | (grad_norm.double() > self._limits[1])
        self._scale = s.scaler.scale
        self._pending = HostCopy(torch.stack([loss, grad_norm, flag.float()]))
        return None if c.action == "log" else flag

    def check(self, s: Session) -> None:
        """FiniteGuard.check, and whether the last step was a spike.

        Raises:
            NonFiniteError: as FiniteGuard.check.
            SpikeError: the step was a spike, and there were too many.
        """
        pending, self._pending = self._pending, None
        skipped = len(s.guard.skipped)
        try:
            s.guard.check()
        except NonFiniteError as error:
            again = self._again(s, pending.read()[1]) if pending else ""
            raise NonFiniteError(f"{error}. {again}" if again else str(error)) from None
        if pending is None:
            return
        loss, grad_norm, flag = pending.read()
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            # train.on_nonfinite has decided; float16's overflows are nothing special
            if len(s.guard.skipped) > skipped:
                if again := self._again(s, grad_norm):
                    s.log.info(f"note    step {s.state.step} is not finite. {again}")
                require_progress(s, "the loss or the gradient norm is not finite")
            return
        if flag:
            self._act(s, self._record(s, loss, grad_norm))
        if self._config.action == "log" or (self._config.action != "off" and not flag):
            window = self._config.window
            more = {"losses": loss, "norms": grad_norm}
            lists = {key: [*s.state.spikes.get(key, ()), value][-window:] for key, value in more.items()}
            s.state = replace(s.state, spikes={**s.state.spikes, **lists})

    def _again(self, s: Session, grad_norm: float) -> str:
        """Recomputes the last step and describes any difference; empty without spike.recheck."""
        if not self._config.recheck or self._scale is None:
            return ""
        from torchtitan_lite.training.spikes.recheck import compute_again

        return compute_again(s, self._forward_backward, grad_norm, self._scale)

    def _record(self, s: Session, loss: float, grad_norm: float) -> dict[str, Any]:
        first = s.state.samples_consumed - s.config.train.batch_size(s.state.step)
        limits = (value if math.isfinite(value) else None for value in self._limits)
        values = dict(zip(("loss", "grad_norm", "loss_limit", "norm_limit"), (loss, grad_norm, *limits), strict=True))
        return values | s.rank_losses() | {"samples": [first, s.state.samples_consumed]}

    def _act(self, s: Session, spike: dict[str, Any]) -> None:
        """Record a spike, and decide what follows. Raises SpikeError."""
        step, action = s.state.step, self._config.action
        again = self._again(s, spike["grad_norm"]) if action != "log" else ""
        spike |= {"recheck": again} if again else {}
        s.log.record({"step": step, "spike": spike | {"action": action}})
        s.log.info(f"SPIKE   step {step}: {describe(spike)}{'' if action == 'log' else '; the update was withheld'}")
        if again:
            s.log.info(f"note    step {step}: {again}")
        if action == "log":
            return
        done = s.state.spikes.get("rewinds", 0)
        if action == "rewind":
            if done >= self._config.max_rewinds:
                raise SpikeError(
                    f"step {step}: {describe(spike)}. The run has gone back {counted(done, 'time')} "
                    "(spike.max_rewinds), and does not again; this step was not saved. spikes.jsonl has what was "
                    "abandoned. A larger spike.max_rewinds continues; a lower optim.lr or a larger spike.rewind_steps "
                    "may help"
                )
            if steps := rewind.checkpoints_before(s, step - self._config.rewind_steps):
                self._rewind = spike, steps
                return
            s.log.info(f"note    there is no checkpoint to go back to: step {step} was skipped")
        skipped = [*s.state.spikes.get("skipped", ()), step]
        s.state = replace(s.state, spikes={**s.state.spikes, "skipped": skipped})
        require_progress(s, describe(spike))

    def rewind(self, s: Session) -> int:
        """Go back to the checkpoint before the spike. Collective. Returns its step."""
        assert self._rewind is not None
        (spike, steps), self._rewind, self._pending = self._rewind, None, None
        rewind.go_back(s, spike, steps, f"of at most {self._config.max_rewinds}")
        return s.state.step


def require_progress(s: Session, what: str) -> None:
    """Raises SpikeError if too many steps up to this one were skipped, as spikes or because they are not finite."""
    step, most = s.state.step, s.config.train.max_skipped
    if {*range(step - most, step + 1)} <= {*s.guard.skipped, *s.state.spikes.get("skipped", ())}:
        raise SpikeError(
            f"step {step}: {what}. This and the {most} steps before it were skipped (train.max_skipped), and nothing "
            "has been saved since. If the loss is right, a larger spike.loss_deviations or spike.norm_deviations "
            "accepts it; a lower optim.lr may help"
        )


def describe(spike: dict[str, Any]) -> str:
    """What was too high, with its limit, and the samples."""
    parts = [
        f"{name} {spike[key]:.4f} above {spike[limit]:.4f}"
        for name, key, limit in (("loss", "loss", "loss_limit"), ("gradient norm", "grad_norm", "norm_limit"))
        if spike[limit] is not None and spike[key] > spike[limit]
    ]
    first, end = spike["samples"]
    return f"{', '.join(parts)}; run samples {first} to {end - 1}"
