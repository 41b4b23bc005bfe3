"""The section of the config with the fast paths: each computes what the plain path does, and can be switched off."""

from pydantic import BaseModel, ConfigDict, NonNegativeInt


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
    gc_every: NonNegativeInt = 100
    """collect Python's garbage every so many steps, on all ranks at once; 0: leave it to Python"""
