"""Sections of the config: the fast paths, each of which computes what the plain path does; and profiling."""

from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, field_validator

_LARGEST = 2**63 - 1  # TOML's integers have 64 bits


class Frozen(BaseModel):
    """What all parts of a config have in common. The string under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Section(Frozen):
    """A table of the TOML file."""

    @field_validator("*", mode="before")
    @classmethod
    def _can_be_written(cls, value: Any) -> Any:
        _require_toml(value)
        return value


def _require_toml(value: Any) -> None:
    """
    Raises:
        ValueError: a number or a text in it can't be written to a TOML file.
    """
    if isinstance(value, int) and not -_LARGEST <= value <= _LARGEST:
        raise ValueError("should be a number of at most 64 bits")
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError("should be UTF-8")
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    for item in value if isinstance(value, list | tuple) else ():
        _require_toml(item)


class SpeedConfig(Section):
    chunked_loss: bool = True
    """compute output matrix and loss together, some tokens at a time: the logits never exist as a whole"""
    block_attention: bool = True
    """CPU: attention of up to 1,024 tokens by plain matrix products, a block of queries at a time"""
    fused_functions: bool = True
    """CPU: RMSNorm and rotary positions in fewer passes over memory, with a backward of their own"""
    shared_memory: bool = True
    """CPU, all ranks on one machine: parameters and gradients go through shared memory, not through gloo's TCP"""
    gc_every: NonNegativeInt = 100
    """collect Python's garbage every so many steps, on all ranks at once; 0: leave it to Python"""


class ProfileConfig(Section):
    steps: list[PositiveInt] = []
    """profile from the first of these steps to the last, e.g. [10, 12]: traces and a table in profile/"""
    memory_snapshot: bool = False
    """CUDA: the allocator's history in these steps as well, for pytorch.org/memory_viz"""
