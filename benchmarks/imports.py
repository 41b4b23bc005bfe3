"""Import times of the dependencies: `python -m benchmarks.imports`. Median of 5 fresh processes, in seconds."""

import statistics
import subprocess
import sys

MODULES = (
    "torch",
    "torch.distributed.fsdp",
    "tokenizers",
    "safetensors.torch",
    "tomli",
    "tomli_w",
    "pydantic",
    "yaml",
    "numpy",
    "filelock",
    "tqdm",
)


def seconds(module: str) -> float:
    """Time one import in a fresh process. Torch is imported before other modules."""
    before = (
        ""
        if module in ("torch", "numpy", "tomli", "tomli_w", "pydantic", "yaml", "filelock", "tqdm")
        else "import torch; "
    )
    code = f"{before}import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Print a table."""
    for module in MODULES:
        print(f"{module:<24} {statistics.median(seconds(module) for _ in range(5)):.2f} s")


if __name__ == "__main__":
    main()
