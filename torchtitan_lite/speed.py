"""Sections of the config: the fast paths, each of which computes what the plain path does; and profiling."""

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt


class Section(BaseModel):
    """A table of the TOML file. The string under a field is its help text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


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
