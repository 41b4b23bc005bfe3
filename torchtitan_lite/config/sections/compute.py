"""[activation_checkpointing], [compile] and [speed]: how blocks compute what they compute."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt

from torchtitan_lite.config.section import BITS, Bits, Machine, Rules, Section, used_with

if TYPE_CHECKING:
    from torchtitan_lite.config.schema import Config


class ActivationCheckpointingConfig(Section):
    mode: Literal["none", "full", "selective"] = "none"
    """what to recompute in backward: whole blocks (full), or all but matrix products and attention (selective)"""
    every: Annotated[PositiveInt, used_with("activation_checkpointing.mode", "full", "selective")] = 1
    """checkpoint every Nth block; 1: all blocks"""


class CompileConfig(Section):
    enabled: Annotated[bool, Bits("compile")] = False
    """compile each block in place with torch.compile"""
    backend: Annotated[
        Literal["inductor", "aot_eager", "eager"], Bits("compile"), used_with("compile.enabled", True)
    ] = "inductor"
    """inductor: fused kernels, needs a compiler; the others only trace (for debugging)"""


class SpeedConfig(Section):
    chunked_loss: Annotated[bool, BITS] = True
    """compute the output projection and the loss in chunks of tokens, without storing all logits"""
    block_attention: Annotated[bool, BITS] = True
    """CPU: attention of up to 1,024 tokens by plain matrix products, one block of queries at a time"""
    fused_functions: Annotated[bool, BITS] = True
    """CPU: RMSNorm and rotary positions in fewer passes over memory, with custom backward functions"""
    widened_products: Annotated[bool, BITS] = True
    """CPU without bfloat16 (or float16) instructions: compute products of that dtype in float32, 18 times as fast"""
    shared_memory: Annotated[bool, BITS] = True
    """CPU, all ranks on one machine: exchange parameters and gradients through shared memory, not gloo's TCP"""
    gc_every: NonNegativeInt = 100
    """run Python's garbage collector every N steps, on all ranks at once; 0: leave it to Python"""


def rules(config: "Config", machine: Machine) -> Rules:
    """The broken rule of activation checkpointing."""
    checkpointing = config.activation_checkpointing
    n_blocks = sum(config.model.stacks)
    if checkpointing.mode != "none" and checkpointing.every > max(n_blocks - 1, 1):
        yield (
            "activation_checkpointing.every model.n_layers",
            f"activation_checkpointing.every = {checkpointing.every} applies only to the first of {n_blocks} "
            f"blocks; every = {max(n_blocks - 1, 1)} works",
        )


def local_rules(config: "Config", machine: Machine) -> Rules:
    """What torch.compile lacks on this machine."""
    if not config.compile.enabled or config.compile.backend != "inductor":
        return
    if missing := missing_for_inductor(config.run.device, machine.n_gpus):
        yield (
            "compile.enabled compile.backend run.device",
            f"compile.enabled = true needs {missing}, which is missing; install it, or set compile.enabled = false",
        )


def missing_for_inductor(device: str, n_gpus: int) -> str:
    """What torch.compile's inductor backend lacks on this machine; empty if nothing."""
    if device != "cpu" and n_gpus:
        return "" if importlib.util.find_spec("triton") else "the package triton"
    named = os.environ.get("CXX", "")
    if not shutil.which(named or "g++"):  # what torch looks for
        return f"the C++ compiler {named} (of $CXX)" if named else "the C++ compiler g++ (or another one in $CXX)"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.is_file() else f"Python's headers ({headers}; python3-dev or similar)"
