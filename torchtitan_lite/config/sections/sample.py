"""[sample]: text that the model generates during the run."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from torchtitan_lite.config.section import Every, Section, UsedIf

_SAMPLING = UsedIf("sample.every", "sample.every above 0")  # 0 may switch it off for this command only


class SampleConfig(Section):
    every: Every = 100
    """generate from the prompts every N steps and at the end; "epoch": after each epoch; 0: never"""
    prompts: Annotated[list[str], _SAMPLING] = Field(default=[], examples=[["def "]])
    """prompts to continue; "" is the start of a document. Default: "def " and "The " for the default text, "" for \
other text, and for pairs three held-out sources, shown with their targets"""
    max_tokens: Annotated[PositiveInt, _SAMPLING] = 48
    """maximum number of new tokens; each gathers all parameters once"""
    temperature: Annotated[NonNegativeFloat, _SAMPLING] = 0.8
    """sampling temperature; 0: greedy"""
