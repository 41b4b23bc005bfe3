"""The cost or benefit of the options of docs/fsdp.md on this machine: `python -m benchmarks.knobs [rounds]`.

Prints tokens per second on two processes, as a ratio to the same run without the option, interleaved; and the memory of
a forward and backward of a 10 M parameter model by mode of activation checkpointing.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from torchtitan_lite.config import load
from torchtitan_lite.distributed.blocks import apply_activation_checkpointing
from torchtitan_lite.distributed.initialize import materialise
from torchtitan_lite.models import build
from torchtitan_lite.tools.allocator import peak_of

ROOT = Path(__file__).parent.parent
BASE = [
    "--optim.name=adamw",
    "--train.micro_batch_size=4",
    "--train.global_batch_size=16",
    "--fsdp.param_dtype=bfloat16",
]
OPTIONS = {
    "param_dtype float32": ["--fsdp.param_dtype=float32"],
    "reduce_dtype bfloat16": ["--fsdp.reduce_dtype=bfloat16"],
    "output_dtype float32": ["--fsdp.output_dtype=float32"],
    "reshard_after_forward true": ["--fsdp.reshard_after_forward=true"],
    "reshard_after_forward false": ["--fsdp.reshard_after_forward=false"],
    "nothing freed in a step": ["--fsdp.reshard_after_forward=false", "--fsdp.reshard_after_backward=false"],
    "explicit_prefetching": ["--fsdp.explicit_prefetching=true"],
    "grad_sync last": ["--fsdp.grad_sync=last"],
    "NO_SHARD": ["--fsdp.sharding_strategy=NO_SHARD"],
    "checkpointing selective": ["--activation_checkpointing.mode=selective"],
    "checkpointing full": ["--activation_checkpointing.mode=full"],
    "compile": ["--compile.enabled=true"],
}


def rate(options: list[str]) -> float:
    """Tokens per second: the median of the lines after the first."""
    with tempfile.TemporaryDirectory() as out_dir:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        common = ["--train.steps=25", "--optim.warmup_steps=2", "--eval.every=0", "--checkpoint.every=0"]
        common += ["--log.every=5", "--run.device=cpu", f"--run.out_dir={out_dir}", "--run.name=run"]
        subprocess.run([*launcher, "train.py", *common, *BASE, *options], cwd=ROOT, check=True, capture_output=True)
        lines = (Path(out_dir) / "run/metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["tokens_per_second"] for line in lines[1:])


def peak_mib(mode: str) -> float:
    """Peak MiB of gradients and activations in one forward and backward."""
    setting = {"activation_checkpointing.mode": load.ConfigValue(mode, ""), "model.size": load.ConfigValue("15M", "")}
    config = load.load(None, setting).config
    with torch.device("meta"):
        model = build(config.model, 4096)
    apply_activation_checkpointing(model, config.activation_checkpointing)
    materialise(model, torch.device("cpu"), 0)
    tokens = torch.randint(4096, (4, 512))
    return peak_of(lambda: model(tokens, tokens).backward()) / 2**20


def main() -> None:
    """Print both tables."""
    rounds = int(sys.argv[1]) if sys.argv[1:] else 3
    ratios: dict[str, list[float]] = {name: [] for name in OPTIONS}
    for _ in range(rounds):
        for name, options in OPTIONS.items():
            ratios[name].append(rate(options) / rate([]))
    print(f"torch {torch.__version__}, {rounds} interleaved pairs each: median (lowest to highest)")
    for name, found in ratios.items():
        print(f"| {name:<28} | {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f}) |", flush=True)
    for mode in ("none", "selective", "full"):
        print(f"| activation checkpointing {mode:<10} | {peak_mib(mode):.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
