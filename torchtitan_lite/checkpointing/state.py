"""The state of a run without its tensors: the content of state.json, and what a resume restores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_lite.config.phases import changes
from torchtitan_lite.data.segments import Segment


@dataclass(frozen=True)
class TrainState:
    """The progress of a run. samples_consumed and the last segment are the position in the data."""

    step: int = 0
    tokens: int = 0
    samples_consumed: int = 0
    segments: Sequence[Segment] = field(
        default_factory=list
    )  # from sample 0 on, see data/segments.py; empty in checkpoints of version 1.0
    source_tokens: Mapping[str, int] = field(default_factory=dict)  # by key of a source; their sum is `tokens`
    phases: Sequence[int] = field(default_factory=list)  # for each of train.phases that has begun: after which step
    grad_scaler: Mapping[str, Any] = field(default_factory=dict)  # with float16, see grad_scaler.py
    skipped: list[int] = field(default_factory=list)  # steps with a skipped update, see finite_guard.py
    spikes: Mapping[str, list[float]] = field(default_factory=dict)  # the window of spike_guard.py
    loss_since: list[float] = field(default_factory=lambda: [0.0, 0.0])  # see metrics.Meter
    end_token: int = 0  # token id
    begin_tokens: list[int] = field(default_factory=list)  # id of the token that begins each document, if any
    imported: Mapping[str, Any] = field(default_factory=dict)  # from the config.json that it started from
    validation: Mapping[str, int] = field(default_factory=dict)  # its sequences, see scoring/validation.py
    tasks: Mapping[str, str] = field(default_factory=dict)  # by task: a hash of its questions
    must_match: Mapping[str, Any] = field(default_factory=dict)  # hashes and derived values, see compatibility.py
    # world size and everything else that orders sums: if it differs, the run resumes, but not bit for bit
    bitwise_setting: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)  # by "section.key"

    @property
    def values(self) -> dict[str, Any]:
        """The values that a resume compares: config and must_match."""
        return {**self.config, **self.must_match}

    @property
    def settings(self) -> dict[str, Any]:
        """The config of the phase that the state is in, by "section.key"."""
        return {**self.config, **changes(self.config.get("train.phases", []), len(self.phases))}

    def after_step(self, samples_consumed: int, tokens: Mapping[str, int]) -> "TrainState":
        """Return the state after a step that ends at this position in the data.

        Args:
            tokens: the step's valid targets, by key of a source.
        """
        return replace(
            self,
            step=self.step + 1,
            tokens=self.tokens + sum(tokens.values()),
            samples_consumed=samples_consumed,
            source_tokens={**self.source_tokens, **{k: self.source_tokens.get(k, 0) + n for k, n in tokens.items()}},
        )

    def continued_by(self, fresh: "TrainState") -> "TrainState":
        """Return this saved state for a run that resumes: progress comes from the checkpoint, settings from the run.

        On a different world size the samples are the same. Sums round in a different order, and dropout masks differ,
        because their seed contains the rank.
        """
        return replace(
            self,
            phases=[
                after  # a fork may have other phases
                for after, one, other in zip(
                    self.phases, *(c.get("train.phases", []) for c in (self.config, fresh.config)), strict=False
                )
                if one == other
            ],
            end_token=fresh.end_token,
            begin_tokens=fresh.begin_tokens,
            validation=fresh.validation,
            tasks={**self.tasks, **fresh.tasks},
            must_match=fresh.must_match,  # a fork may have a different text
            bitwise_setting=fresh.bitwise_setting,
            config=fresh.config,
        )
