"""The checks that need a GPU, in one command: `python -m benchmarks.gpu`.

First the tests that only a GPU can run (bitwise resume, the CPU's initial parameters and losses), then tokens per
second and peak memory of a 124 M GPT on all GPUs of this machine, for a few settings, printed as a table.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "float32": ["--fsdp.param_dtype=float32"],
    "bfloat16": ["--fsdp.param_dtype=bfloat16"],
    "bfloat16, explicit prefetching": ["--fsdp.param_dtype=bfloat16", "--fsdp.explicit_prefetching=true"],
    "bfloat16, deterministic": ["--fsdp.param_dtype=bfloat16", "--run.deterministic=true"],
}


def measure(options: list[str], n: int) -> tuple[float, float]:
    """Tokens per second (median of the lines after the first) and peak memory in GiB of 60 steps."""
    with tempfile.TemporaryDirectory() as out_dir:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        common = ["--config", "configs/gpt_124m.toml", "--tokenizer.vocab_size=16384", "--train.steps=60"]
        common += [f"--train.global_batch_size={16 * n}", "--optim.warmup_steps=10", "--eval.every=0", "--log.every=10"]
        common += ["--checkpoint.every=0", f"--run.out_dir={out_dir}", "--fsdp.explicit_prefetching=false"]
        subprocess.run([*launcher, "train.py", *common, *options], cwd=ROOT, check=True, capture_output=True)
        lines = (Path(out_dir) / "gpt_124m" / "metrics.jsonl").read_text().splitlines()
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
        print(f"{name:<32} {rate:>12,.0f} tokens/s  {memory:6.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
