"""[activation_checkpointing]: what backward recomputes."""

from typing import Annotated, Literal

from pydantic import PositiveInt

from torchtitan_lite.config.section import Bits, Section, used_with


class ActivationCheckpointingConfig(Section):
    mode: Annotated[Literal["none", "full", "selective"], Bits("activation_checkpointing")] = "none"
    """what to recompute in backward: whole blocks (full), or all but matmuls and attention (selective)"""
    every: Annotated[
        PositiveInt,
        Bits("activation_checkpointing"),
        used_with("activation_checkpointing.mode", "full", "selective"),
    ] = 1
    """checkpoint every Nth block; 1: all blocks"""
