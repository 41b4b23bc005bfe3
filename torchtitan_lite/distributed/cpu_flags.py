"""Which 16-bit products this CPU has instructions for."""

import functools
import platform

import torch
import torch.distributed as dist

from torchtitan_lite.distributed.process_group import from_rank0


@functools.cache
def slow_on_rank0() -> tuple[str, ...]:
    """`slow_dtypes` of rank 0, which decides for all. The first call is a collective."""
    return from_rank0(slow_dtypes()) if dist.is_initialized() else slow_dtypes()


def slow_dtypes() -> tuple[str, ...]:
    """The 16-bit dtypes that this CPU has no instructions for: a product takes 20 to 40 times as long as in float32.

    Found by flags, as a choice by timing could differ between ranks and resumes.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    mkldnn = torch.ops.mkldnn  # its answers respect ONEDNN_MAX_CPU_ISA, but it also emulates bfloat16
    bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    fast = {"bfloat16": bfloat16 and mkldnn._is_mkldnn_bf16_supported(), "float16": mkldnn._is_mkldnn_fp16_supported()}
    return tuple(dtype for dtype, supported in fast.items() if not supported)
