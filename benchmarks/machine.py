"""One line that describes this machine's CPU, for the head of a table."""

import os
import platform
from pathlib import Path

import torch

from torchtitan_lite.environment import usable_cores

FLAGS = "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16"
# MKL multiplies float32, oneDNN 16-bit matrices; the third limits torch's own kernels
LIMITS = "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"


def cpu() -> str:
    """Return the CPU, its flags, torch's capability, and environment variables that limit them."""
    info = Path("/proc/cpuinfo")
    read = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    fields = dict(line.split(":", 1) for line in read.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    has = fields.get("flags", "").split()
    flags = ", ".join(flag for flag in FLAGS if flag in has) or "none of " + ", ".join(FLAGS)
    limits = [f"{key}={os.environ[key]}" for key in LIMITS if key in os.environ]
    limited = f", limited by {' '.join(limits)}" if limits else ""
    name = fields.get("model name", platform.machine())
    return f"{usable_cores()} cores of {name} with {flags} (torch: {torch.backends.cpu.get_cpu_capability()}{limited})"
