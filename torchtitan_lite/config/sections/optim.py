"""[optim]: the registry of optimizers, their keys, and the learning rate.

A new optimizer is one file in optim/ and one entry of OPTIMIZERS. Its keys are fields of OptimConfig.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from torchtitan_lite.config.registry import Registry
from torchtitan_lite.config.section import (
    FORK,
    REFUSED,
    PositiveEvery,
    Resume,
    Section,
    used_with,
)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, as plain data, so that a config needs no torch."""

    build: str  # "module:function", which is called with the parameter groups and the OptimConfig
    keys: tuple[str, ...] = ()  # [optim] keys that not every optimizer reads


OPTIMIZERS = Registry(
    "optim.name",
    "docs/extending.md",
    Optimizer,
    {
        "adamw": Optimizer("torchtitan_lite.optim.optimizer:adamw", keys=("betas", "eps")),
        "sgd": Optimizer("torchtitan_lite.optim.optimizer:sgd"),
        "muon": Optimizer(
            "torchtitan_lite.optim.muon:Muon",
            keys=("betas", "eps", "muon_momentum", "muon_embedding_lr_factor"),
        ),
    },
)


class ParameterGroup(Section):
    match: str
    """pattern of parameter names, e.g. "*norm*" or "layers.0.*"; the first matching group applies"""
    lr_factor: NonNegativeFloat = 1.0
    """factor of the learning rate"""
    weight_decay: NonNegativeFloat | None = None
    """replaces [optim] weight_decay; absent: unchanged"""


_Beta = Annotated[float, Field(ge=0, lt=1)]
_STEPPED = used_with("optim.schedule", "step")


class OptimConfig(Section):
    """Keys that only some optimizers read are listed in their entries of `OPTIMIZERS`, and unused with the others."""

    on_resume: ClassVar[Resume] = FORK

    name: Annotated[str, AfterValidator(OPTIMIZERS.known), REFUSED] = "muon"
    """muon: Muon for the matrices of the blocks, AdamW for the rest; sgd: with a momentum of 0.9"""
    lr: PositiveFloat = 8e-3
    """peak learning rate"""
    betas: tuple[_Beta, _Beta] = (0.9, 0.99)
    """adamw, and muon's AdamW part: decay rates of the two moments"""
    eps: PositiveFloat = 1e-8
    """adamw, and muon's AdamW part: added to the root of the second moment"""
    muon_momentum: float = Field(default=0.9, gt=0, lt=1)
    """muon: momentum (Nesterov's)"""
    muon_embedding_lr_factor: NonNegativeFloat = 3.0
    """muon: learning-rate factor of token embeddings that are not tied to the head"""
    weight_decay: NonNegativeFloat = 0.1
    """of matrices (not of biases and norms)"""
    freeze: Annotated[list[str], REFUSED] = Field(default=[], examples=[["tok_embeddings.*", "layers.0.*"]])
    """patterns of parameters to freeze"""
    groups: list[ParameterGroup] = Field(default=[], examples=[[{"match": "*norm*", "lr_factor": 0.5}]])
    """learning rate or decay by parameter: [[optim.groups]] match = "*", lr_factor, weight_decay"""
    schedule: Literal["cosine", "linear", "wsd", "constant", "step"] = "cosine"
    """learning rate after warm-up; wsd: constant, then linear over the last decay_ratio of the steps; step: \
multiplied by step_gamma every step_every steps"""
    warmup_steps: NonNegativeInt = 20
    """steps of linear warm-up; a default that does not fit becomes a tenth of the steps"""
    decay_ratio: Annotated[float, used_with("optim.schedule", "wsd")] = Field(default=0.2, gt=0, le=1)
    """wsd: fraction of the steps that decay"""
    min_lr_ratio: Annotated[float, used_with("optim.schedule", "cosine", "linear", "wsd")] = Field(
        default=0.1, ge=0, le=1
    )
    """cosine, linear, wsd: final learning rate as a fraction of lr"""
    step_gamma: Annotated[float, _STEPPED] = Field(default=0.85, gt=0, le=1)
    """step: the factor"""
    step_every: Annotated[PositiveEvery, _STEPPED] = "epoch"  # type: ignore[assignment]
    """step: every N steps, counted from the first; "epoch": after each epoch"""
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """also keep a moving average of the weights, with this decay per step, e.g. 0.99; 0: off"""
    max_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """clip gradients to this global norm; inf: off"""
