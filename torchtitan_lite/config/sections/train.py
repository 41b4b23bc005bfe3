"""[train] and [spike]: length, batches, and what happens to bad steps."""

import itertools
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt

from torchtitan_lite.config.section import (
    ALLOWED_FOR_LATER_STEPS,
    BITS,
    FORK,
    Machine,
    Resume,
    Rules,
    Section,
    Size,
    UsedIf,
    used_with,
)

if TYPE_CHECKING:
    from torchtitan_lite.config.schema import Config


def _batch_schedule(value: list[list[int]]) -> list[list[int]]:
    steps = [pair[0] for pair in value if len(pair) == 2 and pair[0] >= 0 < pair[1] < 2**31]
    if len(steps) < len(value) or any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError("should be pairs of a step and a batch size, by rising steps")
    return value


_BEFORE_THE_SCHEDULE = UsedIf(
    "train.batch_schedule",
    "a train.batch_schedule that begins after step 0",
    lambda c: not c.train.batch_schedule or c.train.batch_schedule[0][0] > 0,
)
_SKIPPING = UsedIf(
    "train.on_nonfinite spike.action",
    'train.on_nonfinite = "skip" or spike.action = "skip"',
    lambda c: "skip" in (c.train.on_nonfinite, c.spike.action),
)
_DETECTING = UsedIf(
    "spike.loss_deviations spike.norm_deviations",
    "spike.loss_deviations or spike.norm_deviations above 0",
    lambda c: bool(c.spike.loss_deviations or c.spike.norm_deviations),
)
_WATCHING = used_with("spike.action", "log", "skip", "stop")
_ROUTING = UsedIf("model.family", "a family with experts", lambda c: c.model.has_experts)


class TrainConfig(Section):
    steps: Annotated[
        int,
        Resume("kept"),
        UsedIf("train.epochs", "train.epochs = 0", lambda c: not c.train.epochs),
    ] = Field(default=750, gt=0, le=10**12)
    """optimizer steps of the whole run"""
    epochs: float = Field(default=0.0, ge=0, le=10**6)
    """passes over the training data, e.g. 3 or 0.5, instead of steps; an epoch is samples / batch size steps, rounded \
up; 0: use steps"""
    seq_len: Annotated[Size, FORK] = 256
    """tokens per sequence"""
    micro_batch_size: Annotated[Size, BITS] = 4
    """sequences per rank in one forward and backward"""
    global_batch_size: Annotated[Size, FORK, _BEFORE_THE_SCHEDULE] = 8
    """sequences per optimizer step, over all ranks; determines gradient accumulation"""
    batch_schedule: Annotated[list[list[int]], FORK, AfterValidator(_batch_schedule)] = Field(
        default=[], examples=[[[0, 16], [1000, 64]]]
    )
    """global batch sizes by step: [[0, 16], [1000, 64]] is 16 sequences at first, and 64 after step 1,000"""
    z_loss: Annotated[NonNegativeFloat, FORK] = 0.0
    """add this times log(Z)^2 to each target's loss, e.g. 1e-4: keeps logits small; logged losses exclude it"""
    router_aux_loss: Annotated[NonNegativeFloat, FORK, _ROUTING] = 0.01
    """add this times the experts' load-balancing loss (Switch Transformers), averaged over layers; logged \
losses exclude it"""
    router_z_loss: Annotated[NonNegativeFloat, FORK, _ROUTING] = 0.0
    """add this times log(Z)^2 of each router, averaged over layers, e.g. 1e-3; logged losses exclude it"""
    router_bias_rate: Annotated[NonNegativeFloat, FORK, used_with("model.router_bias", True)] = 0.001
    """after each step, change the bias of each expert by this: up if its load is below the mean, else down"""
    on_nonfinite: Annotated[Literal["stop", "skip"], ALLOWED_FOR_LATER_STEPS] = "stop"
    """on a non-finite loss or gradient norm: stop the run, or skip and record the step"""
    max_skipped: Annotated[PositiveInt, ALLOWED_FOR_LATER_STEPS, _SKIPPING] = 10
    """with skip (also of spikes): stop after more than this many skipped steps in a row"""

    def batch_size(self, step: int) -> int:
        """Return the sequences of a step (1-based), over all ranks."""
        return next((size for after, size in reversed(self.batch_schedule) if after < step), self.global_batch_size)

    @property
    def samples(self) -> int:
        """Sequences of the whole run."""
        changes = [0, *(min(after, self.steps) for after, _ in self.batch_schedule), self.steps]
        return sum((end - start) * self.batch_size(start + 1) for start, end in itertools.pairwise(changes))


class SpikeConfig(Section):
    on_resume: ClassVar[Resume] = Resume("allowed", "the window of losses is restored")

    action: Annotated[Literal["off", "log", "skip", "stop"], _DETECTING] = "off"
    """on a loss or gradient norm far above the previous ones: log it; skip the update; or stop the run, and print the \
command of a fork that skips the samples"""
    window: Annotated[int, _WATCHING] = Field(default=128, ge=4, le=10_000)
    """compare with this many steps; detection starts when they are complete, after the warm-up"""
    loss_deviations: Annotated[NonNegativeFloat, _WATCHING] = 8.0
    """a loss is a spike if it is this many deviations above the median of the window; 0: off. A deviation is 1.48 \
times the median absolute deviation (an estimate of the std), at least 2 % of the median"""
    norm_deviations: Annotated[NonNegativeFloat, _WATCHING] = 20.0
    """the same for the gradient norm"""


def rules(config: "Config", machine: Machine) -> Rules:
    """Yield the broken rules of sequence lengths and epochs."""
    train, model = config.train, config.model
    if train.seq_len > model.max_seq_len:
        yield (
            "train.seq_len model.max_seq_len",
            f"train.seq_len = {train.seq_len} is longer than model.max_seq_len = {model.max_seq_len}; "
            f"model.max_seq_len = {train.seq_len} works",
        )
    if any(size != train.batch_size(1) for _, size in train.batch_schedule):
        for key in config.in_epochs:
            works = "train.steps" if key == "train.epochs" else f"{key} = 100"
            yield (
                f"{key} train.batch_schedule",
                f"{key} is in epochs, which need one batch size, but train.batch_schedule changes it; {works} works",
            )
