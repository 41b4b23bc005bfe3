"""Products in each dtype, with and without `speed.widened_products`: `python -m benchmarks.products`.

Prints the least of several CPU times of forward and backward of a linear layer on one core, in milliseconds, at shapes
of the default model and of the 17 M benchmark. `MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
ATEN_CPU_CAPABILITY=avx2` before the command stands in for a CPU with AVX2 only.
"""

import os

import torch
import torch.nn.functional as F

from benchmarks.candidates import core_ms, leaf
from torchtitan_lite.cpu import widened
from torchtitan_lite.cpu.widened import slow_dtypes

SHAPES = {"dim 128 -> 344, 1,024 tokens": (1024, 128, 344), "dim 384 -> 1,024, 2,048 tokens": (2048, 384, 1024)}


def main() -> None:
    torch.set_num_threads(1)
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "none")
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, ONEDNN_MAX_CPU_ISA {limit}")
    print(f"without instructions: {', '.join(slow_dtypes()) or 'none'}\n")
    print("| product | dtype | as it is | widened | float32 / widened |")
    print("|---|---|---:|---:|---:|")
    for name, (tokens, width, out) in SHAPES.items():
        x, weight = leaf(tokens, width, dtype=torch.float32), leaf(out, width, dtype=torch.float32)
        full = core_ms(lambda x=x, w=weight: F.linear(x, w))  # type: ignore[misc]
        print(f"| {name} | float32 | {full:.2f} | | |")
        for dtype in widened.DTYPES:
            x, weight = leaf(tokens, width, dtype=dtype), leaf(out, width, dtype=dtype)
            plain = core_ms(lambda x=x, w=weight: F.linear(x, w))  # type: ignore[misc]
            wide = core_ms(lambda x=x, w=weight: widened.linear(x, w))  # type: ignore[misc]
            label = str(dtype).removeprefix("torch.")
            print(f"| {name} | {label} | {plain:.2f} | {wide:.2f} | {full / wide:.2f} |", flush=True)


if __name__ == "__main__":
    main()
