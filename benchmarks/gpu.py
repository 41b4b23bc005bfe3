"""The checks that need a GPU, in one command: `python -m benchmarks.gpu`.

First the tests that only a GPU can run (bitwise resume, the CPU's initial parameters and losses, the table of FSDP2's
options), then tokens per second and peak memory on all GPUs of this machine, printed as a table: a 124 M GPT, and a
Llama of about 1 B parameters by dtype, compilation and activation checkpointing.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
GPT = ["--config", "configs/gpt_124m.toml", "--fsdp.explicit_prefetching=false", "--train.micro_batch_size=8"]
LLAMA = ["--config", "configs/llama_1b.toml", "--fsdp.explicit_prefetching=false"]
BF16 = ["--fsdp.param_dtype=bfloat16"]
SETTINGS = {
    "gpt 124M, float32": [*GPT, "--fsdp.param_dtype=float32"],
    "gpt 124M, bfloat16": [*GPT, *BF16],
    "gpt 124M, bfloat16, explicit prefetching": [*GPT, *BF16, "--fsdp.explicit_prefetching=true"],
    "gpt 124M, bfloat16, deterministic": [*GPT, *BF16, "--run.deterministic=true"],
    "llama 1B, float32": [*LLAMA, "--fsdp.param_dtype=float32"],
    "llama 1B, bfloat16": [*LLAMA, *BF16],
    "llama 1B, bfloat16, selective": [*LLAMA, *BF16, "--activation_checkpointing.mode=selective"],
    "llama 1B, bfloat16, full": [*LLAMA, *BF16, "--activation_checkpointing.mode=full"],
    "llama 1B, bfloat16, compiled": [*LLAMA, *BF16, "--compile.enabled=true"],
    "llama 1B, bfloat16, compiled, selective": [
        *(*LLAMA, *BF16, "--compile.enabled=true", "--activation_checkpointing.mode=selective")
    ],
}


def measure(options: list[str], n: int) -> tuple[float, float]:
    """Tokens per second (median of the lines after the first) and peak memory in GiB of 30 steps."""
    with tempfile.TemporaryDirectory() as out_dir:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        common = ["--tokenizer.path=", "--tokenizer.vocab_size=16384", "--train.steps=30", "--run.name=run"]
        common += [f"--train.global_batch_size={8 * n}", "--optim.warmup_steps=10", "--eval.every=0", "--log.every=5"]
        common += ["--checkpoint.every=0", f"--run.out_dir={out_dir}"]
        result = subprocess.run([*launcher, "train.py", *options, *common], cwd=ROOT, capture_output=True, text=True)
        if result.returncode:
            why = next((line for line in result.stderr.splitlines() if "Error" in line), "no message")
            print(f"    {why.strip()[:150]}")  # out of memory, most likely: the table goes on
            return 0.0, math.nan
        lines = (Path(out_dir) / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines][1:]
    return statistics.median(r["tokens_per_second"] for r in records), records[-1]["peak_memory_gib"]


def main() -> None:
    """Test, then print the table."""
    n = torch.cuda.device_count()
    if n == 0:
        sys.exit("torch sees no GPU here")
    subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/test_cuda.py"], cwd=ROOT, check=True)
    print(f"{n} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, options in SETTINGS.items():
        rate, memory = measure(options, n)
        print(f"{name:<42} {rate:>12,.0f} tokens/s  {memory:6.2f} GiB" if rate else f"{name:<42} failed", flush=True)


if __name__ == "__main__":
    main()
