"""[profile]: traces of some steps."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from torchtitan_lite.config.section import Section, UsedIf

_REACHED = UsedIf(
    "train.epochs profile.steps train.steps",
    "train.steps that reach them",
    lambda epochs, profiled, steps: epochs > 0 or min(profiled, default=0) <= steps,
)
_PROFILES = UsedIf("profile.steps", "profile.steps, e.g. [10, 12]")


class ProfileConfig(Section):
    steps: Annotated[list[PositiveInt], _REACHED] = Field(default=[], examples=[[10, 12]])
    """first and last step to profile, e.g. [10, 12]; writes traces and a table to profile/"""
    ranks: Annotated[list[NonNegativeInt], _PROFILES] = Field(default=[], examples=[[0, 8]])
    """ranks to profile; []: the first rank of each machine, of at most eight machines"""
    memory_snapshot: Annotated[bool, _PROFILES] = False
    """CUDA: also record the allocator's history in these steps, for pytorch.org/memory_viz"""
