"""[train] and [spike]: length, batches, and what happens to bad steps."""

import itertools
import operator
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PlainValidator, PositiveInt

from torchtitan_lite.config.phases import checked
from torchtitan_lite.config.section import (
    ALLOWED_FOR_LATER_STEPS,
    BITS,
    FORK,
    IS_PATH,
    Resume,
    Section,
    Size,
    UsedIf,
    used_with,
)


def _batch_schedule(value: list[list[int]]) -> list[list[int]]:
    steps = [pair[0] for pair in value if len(pair) == 2 and pair[0] >= 0 < pair[1] < 2**31]
    if len(steps) < len(value) or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError("should be pairs of a step and a batch size, by rising steps")
    return value


_BEFORE_THE_SCHEDULE = UsedIf(
    "train.batch_schedule",
    "a train.batch_schedule that begins after step 0",
    lambda schedule: not schedule or schedule[0][0] > 0,
)
_SKIPPING = UsedIf(
    "train.on_nonfinite spike.action",
    'train.on_nonfinite = "skip" or spike.action = "skip"',
    lambda *actions: "skip" in actions,
)
_DETECTING = UsedIf(
    "spike.loss_deviations spike.norm_deviations",
    "spike.loss_deviations or spike.norm_deviations above 0",
    lambda *deviations: any(deviations),
)
_WATCHING = used_with("spike.action", "log", "skip", "stop")
_ROUTING = UsedIf("model.has_experts", "a family with experts")


class TrainConfig(Section):
    steps: Annotated[
        int,
        Resume("kept"),
        UsedIf("train.epochs", "train.epochs = 0", operator.not_),
    ] = Field(default=750, gt=0, le=10**12)
    """optimizer steps of the whole run"""
    epochs: float = Field(default=0.0, ge=0, le=10**6)
    """passes over the training data, e.g. 3 or 0.5, instead of steps; 0: use steps"""
    seq_len: Annotated[Size, FORK] = 256
    """tokens per sequence"""
    micro_batch_size: Annotated[Size, BITS] = 4
    """sequences per rank in one forward and backward"""
    global_batch_size: Annotated[Size, FORK, _BEFORE_THE_SCHEDULE] = 8
    """sequences per optimizer step, over all ranks"""
    batch_schedule: Annotated[list[list[int]], FORK, AfterValidator(_batch_schedule)] = Field(
        default=[], examples=[[[0, 16], [1000, 64]]]
    )
    """global batch sizes by step: [[0, 16], [1000, 64]] is 16 at first, and 64 after step 1,000"""
    phases: Annotated[list[dict[str, Any]], FORK, IS_PATH, PlainValidator(checked)] = Field(
        default=[], examples=[[{"from_fraction": 0.8, "data": {"sources": {"data/web": 1.0}}}]]
    )
    """changes within the run, as [[phases]] tables (docs/phases.md)"""
    z_loss: Annotated[NonNegativeFloat, FORK] = 0.0
    """add this times log(Z)^2 to each target's loss, e.g. 1e-4; logged losses exclude it"""
    router_aux_loss: Annotated[NonNegativeFloat, FORK, _ROUTING] = 0.01
    """add this times the experts' load-balancing loss (Switch Transformers); logged losses exclude it"""
    router_z_loss: Annotated[NonNegativeFloat, FORK, _ROUTING] = 0.0
    """add this times log(Z)^2 of each router, e.g. 1e-3; logged losses exclude it"""
    router_bias_rate: Annotated[NonNegativeFloat, FORK, used_with("model.router_bias", True)] = 0.001
    """with router_bias: how far each step moves an expert's bias towards the mean load"""
    on_nonfinite: Annotated[Literal["stop", "skip"], ALLOWED_FOR_LATER_STEPS] = "stop"
    """on a loss or gradient norm that is not finite: stop the run, or skip and record the step"""
    max_skipped: Annotated[PositiveInt, ALLOWED_FOR_LATER_STEPS, _SKIPPING] = 10
    """with skip (also of spikes): stop after more than this many skipped steps in a row"""

    def batch_size(self, step: int) -> int:
        """Return the sequences of a step (1-based), over all ranks."""
        return next((size for after, size in reversed(self.batch_schedule) if after < step), self.global_batch_size)

    def samples(self, first: int = 0, last: int | None = None) -> int:
        """Return the sequences of the steps after `first`, up to `last` (default: of the whole run), without phases."""
        last = self.steps if last is None else last
        changes = [first, *(min(max(after, first), last) for after, _ in self.batch_schedule), last]
        return sum((end - start) * self.batch_size(start + 1) for start, end in itertools.pairwise(changes))

    @property
    def later_sources(self) -> list[str]:
        """The names of the sources of all phases."""
        return [name for phase in self.phases for name in phase.get("data", {}).get("sources", [])]

    def boundaries(self, begun: Sequence[int] = ()) -> list[int]:
        """Return after which step each phase begins. Those that have begun stay where they were."""
        steps = [phase.get("from_step") or round(phase["from_fraction"] * self.steps) for phase in self.phases]
        return [*begun, *steps[len(begun) :]]


class SpikeConfig(Section):
    on_resume: ClassVar[Resume] = Resume("allowed", "the window of losses is restored")

    action: Annotated[Literal["off", "log", "skip", "stop"], _DETECTING] = "off"
    """on a loss or gradient norm far above the previous ones: log it, skip the update, or stop with the command of \
a fork that skips the samples"""
    window: Annotated[int, _WATCHING] = Field(default=128, ge=4, le=10_000)
    """compare with this many steps; detection starts when they are complete, after the warm-up"""
    loss_deviations: Annotated[NonNegativeFloat, _WATCHING] = 8.0
    """a loss is a spike if it is this many deviations above the median of the window; 0: off. A deviation is 1.48 \
times the median absolute deviation, and at least 2 % of the median"""
    norm_deviations: Annotated[NonNegativeFloat, _WATCHING] = 20.0
    """the same for the gradient norm"""
