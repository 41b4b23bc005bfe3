"""The effect of `process.keep_freed_memory`: `python -m benchmarks.freed_memory`.

Runs the default experiment's first 40 steps on two processes with and without it, in turn. Prints tokens per second and
their ratio, and checks that the losses are bitwise equal.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAIRS = 5
STEPS = 40


def worker() -> None:
    """train.py, with or without the function."""
    sys.path.insert(0, str(ROOT))
    import train
    from torchtitan_lite import process
    from torchtitan_lite.distributed import process_group

    if os.environ["KEEP"] == "0":
        process.keep_freed_memory = lambda: None
    process_group.exit_process(train.main(sys.argv[1:]))


def run(keep: bool, out_dir: str) -> tuple[float, list[float]]:
    """Tokens per second (median of the lines after the first), and all losses."""
    name = f"keep{keep}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    options = [
        "--run.device=cpu",
        *("--optim.name=adamw", "--train.micro_batch_size=8", "--train.global_batch_size=16"),
        "--model.family=gpt",
        f"--run.out_dir={out_dir}",
        f"--run.name={name}",
        f"--train.steps={STEPS}",
    ]
    options += ["--eval.every=0", "--checkpoint.every=0", "--log.every=10"]
    env = os.environ | {"KEEP": str(int(keep)), "OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, *options], env=env, check=True, capture_output=True)
    folder = Path(out_dir) / name
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(r["tokens_per_second"] for r in records[1:]), [r["loss"] for r in records]


def main() -> None:
    """Print one line per pair, and the median."""
    ratios = []
    for pair in range(PAIRS):
        with tempfile.TemporaryDirectory() as out_dir:
            without, losses = run(False, out_dir)
            with_it, same = run(True, out_dir)
        assert losses == same, "it changed a number"
        ratios.append(with_it / without)
        print(f"pair {pair + 1}: {without:,.0f} -> {with_it:,.0f} tokens/s, ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    worker() if "RANK" in os.environ else main()
