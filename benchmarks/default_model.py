"""Which small model learns best in the time of the default experiment: `python -m benchmarks.default_model`.

Each candidate runs 30 steps to measure its speed, and then as many as fit into 100 seconds on two processes, with a
schedule over those steps. Prints validation bits per byte.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SECONDS = 100
CANDIDATES = {
    "gpt 1M, lr 4e-3": ["--model.family=gpt", "--optim.lr=4e-3"],
    "llama 1M, lr 4e-3": ["--model.family=llama", "--model.qk_norm=false", "--optim.lr=4e-3"],
    "llama 1M, lr 8e-3": ["--model.family=llama", "--model.qk_norm=false", "--optim.lr=8e-3"],
    "llama 1M, lr 4e-3, tied": [
        "--model.family=llama",
        "--model.qk_norm=false",
        "--optim.lr=4e-3",
        "--model.tie_embeddings=true",
    ],
}


def run(out_dir: Path, name: str, steps: int, options: list[str]) -> list[dict[str, Any]]:
    """The records of a run on two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    ours = ["--optim.name=adamw", "--train.micro_batch_size=8", "--train.global_batch_size=16"]
    ours += ["--run.device=cpu", f"--run.out_dir={out_dir}", f"--run.name={name}", f"--train.steps={steps}"]
    ours += [f"--eval.every={max(steps // 5, 1)}", "--checkpoint.every=0", "--log.every=10"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, *ours, *options], cwd=ROOT, env=environment, check=True, capture_output=True)
    return [json.loads(line) for line in (out_dir / name / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Print a line per candidate."""
    for name, options in CANDIDATES.items():
        with tempfile.TemporaryDirectory() as folder:
            short = [r for r in run(Path(folder), "short", 30, options) if "loss" in r]
            rate = short[-1]["tokens_per_second"]
            steps = int(SECONDS * rate / 4096)
            records = run(Path(folder), "long", steps, options)
        curve = "  ".join(f"{r['step']}: {r['val_bits_per_byte']:.3f}" for r in records if "val_loss" in r)
        print(f"{name:<26} {rate:>7,.0f} tokens/s, {steps} steps; bits/byte at step  {curve}", flush=True)


if __name__ == "__main__":
    main()
