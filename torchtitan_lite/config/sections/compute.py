"""[activation_checkpointing], [compile] and [speed]: how blocks are computed."""

import importlib.util
import math
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
    mode: Annotated[Literal["none", "full", "selective"], Bits("activation_checkpointing")] = "none"
    """what to recompute in backward: whole blocks (full), or all but matmuls and attention (selective)"""
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
    """inductor: fused kernels, needs a compiler; the others only trace (for debugging)"""


class SpeedConfig(Section):
    chunked_loss: Annotated[bool, BITS] = True
    """compute the output projection and the loss in chunks of tokens, without storing all logits"""
    block_attention: Annotated[bool, BITS] = True
    """CPU: attention of up to 1,024 tokens by plain matmuls, one block of queries at a time"""
    fused_functions: Annotated[bool, BITS] = True
    """CPU: RMSNorm and rotary positions in fewer passes over memory, with custom backward functions"""
    widen_matmuls: Annotated[bool, BITS] = True
    """CPU without bfloat16 (or float16) instructions: compute matmuls of that dtype in float32, 15 times faster"""
    shared_memory: Annotated[bool, BITS] = True
    """CPU, all ranks on one machine: exchange parameters and gradients through shared memory, not gloo's TCP"""
    float8: Annotated[bool, BITS] = False
    """compute and gather the linear layers of blocks in float8 (GPUs of capability 8.9; extra float8); a CPU \
emulates it, for tests"""
    gc_every: NonNegativeInt = 100
    """run Python's garbage collector every N steps, on all ranks at once; 0: leave it to Python"""


def rules(config: "Config", machine: Machine) -> Rules:
    """Yield the settings that float8 does not support."""
    if not config.speed.float8:
        return
    fsdp, micro_batch = config.fsdp, config.train.micro_batch_size
    # the weight-gradient matmul sums over the tokens; batches of pairs are padded to a multiple of 8 columns
    lengths = {8} if config.data.objective == "pairs" else {config.input_len, config.target_len}
    if any(micro_batch * length % 16 for length in lengths):
        yield (
            "speed.float8 train.micro_batch_size",
            "speed.float8 = true needs a multiple of 16 tokens in a micro-batch, which train.micro_batch_size = "
            f"{micro_batch} does not give; multiples of {16 // math.gcd(16, *lengths)} work, or speed.float8 = false",
        )
    if (dtypes := fsdp.dtypes("param_dtype") - {None}) != {"bfloat16"}:
        other = min(str(dtype) for dtype in dtypes - {"bfloat16"})
        yield (
            "speed.float8 fsdp.param_dtype fsdp.precision_overrides",
            'speed.float8 = true needs fsdp.param_dtype = "bfloat16" for all groups, as its matmuls return bfloat16, '
            f'but some have "{other}"; speed.float8 = false works, or fsdp.param_dtype = "bfloat16"',
        )
    if not isinstance(fsdp.reshard_after_forward, bool | str):
        yield (
            "speed.float8 fsdp.reshard_after_forward",
            f"fsdp.reshard_after_forward = {fsdp.reshard_after_forward} can't gather float8 again in backward; "
            "true, false or default works, or speed.float8 = false",
        )
    if fsdp.shard_columns:
        yield (
            "speed.float8 fsdp.shard_columns",
            "fsdp.shard_columns splits matrices by columns, but speed.float8 = true gathers rows; fsdp.shard_columns = "
            "[] works, or speed.float8 = false",
        )
    if fsdp.cpu_offload:
        yield (
            "speed.float8 fsdp.cpu_offload",
            "fsdp.cpu_offload = true keeps shards on the host, but speed.float8 = true casts them on the GPU; "
            "fsdp.cpu_offload = false works, or speed.float8 = false",
        )


def local_rules(config: "Config", machine: Machine) -> Rules:
    """Yield what torchao and torch.compile lack on this machine."""
    if config.speed.float8 and importlib.util.find_spec("torchao") is None:
        yield (
            "speed.float8",
            'speed.float8 = true needs torchao, which is not installed; run pip install -e ".[float8]", or set '
            "speed.float8 = false",
        )
    if not config.compile.enabled or config.compile.backend != "inductor":
        return
    if missing := missing_for_inductor(config.run.device, machine.n_gpus):
        yield (
            "compile.enabled compile.backend run.device",
            f"compile.enabled = true needs {missing}, which is missing; install it, or set compile.enabled = false",
        )


def missing_for_inductor(device: str, n_gpus: int) -> str:
    """Return what torch.compile's inductor backend lacks on this machine; empty if nothing."""
    if device != "cpu" and n_gpus:
        return "" if importlib.util.find_spec("triton") else "the package triton"
    named = os.environ.get("CXX", "")
    if not shutil.which(named or "g++"):  # what torch looks for
        return f"the C++ compiler {named} (of $CXX)" if named else "the C++ compiler g++ (or $CXX)"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.is_file() else f"Python's headers ({headers}; python3-dev or similar)"
