"""[activation_checkpointing], [compile] and [speed]: what a step recomputes, compiles, and computes otherwise."""

from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt

from torchtitan_lite.config.section import BITS, Bits, Section, used_with


class ActivationCheckpointingConfig(Section):
    mode: Annotated[Literal["none", "full", "selective"], Bits("activation_checkpointing")] = "none"
    """what backward recomputes: whole blocks (full), or all but matmuls and attention (selective)"""
    every: Annotated[
        PositiveInt,
        Bits("activation_checkpointing"),
        used_with("activation_checkpointing.mode", "full", "selective"),
    ] = 1
    """checkpoint every Nth block; 1: all blocks"""


class CompileConfig(Section):
    enabled: Annotated[bool, Bits("compile")] = False
    """compile each block in place with torch.compile"""
    backend: Annotated[
        Literal["inductor", "aot_eager", "eager"], Bits("compile"), used_with("compile.enabled", True)
    ] = "inductor"
    """inductor: fused kernels, needs a compiler; the others only trace"""


class SpeedConfig(Section):
    chunked_loss: Annotated[bool, BITS] = True
    """compute output projection and loss in chunks of tokens, without storing all logits"""
    block_attention: Annotated[bool, BITS] = True
    """CPU: attention of up to 1,024 tokens by plain matmuls"""
    fused_functions: Annotated[bool, BITS] = True
    """CPU: RMSNorm and rotary positions in fewer passes over memory"""
    widen_matmuls: Annotated[bool, BITS] = True
    """CPU without bfloat16 (or float16) instructions: their matmuls in float32, 15 times faster"""
    shared_memory: Annotated[bool, BITS] = True
    """CPU, all ranks on one machine: exchange through shared memory, not gloo's TCP"""
    float8: Annotated[bool, BITS] = False
    """linear layers of blocks in float8 (GPUs of capability 8.9; extra float8)"""
    gc_every: NonNegativeInt = 100
    """run Python's garbage collector every N steps, on all ranks at once; 0: leave it to Python"""
