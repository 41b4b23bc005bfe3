"""Costs that grow with the number of ranks: `python -m benchmarks.scale [RANKS ...]`, by default 2 to 32.

Runs train.py with a tiny model on RANKS processes of this machine. Rank 0 counts in the start, in a step and in a save:
collectives, their bytes in and out, and requests to the store; also a checkpoint's files and manifest, and a log line.
Wall times would only show that the ranks share two cores. A straight line is fitted to the counts. It prints the line's
values for 1,024 and 16,384 ranks, and the largest error of the fit. `python -m benchmarks.scale saves`: what a sharded
save and load cost one rank of up to 1,024 (benchmarks/scale_saves.py).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu

ROOT = Path(__file__).parent.parent
LARGE = 1024, 16_384
STEPS = 6
OPTIONS: dict[str, Any] = {
    **{"model.dim": 64, "model.n_layers": 2, "model.n_heads": 2, "tokenizer.vocab_size": 512, "train.seq_len": 32},
    **{"train.micro_batch_size": 1, "train.steps": STEPS, "log.every": 1, "eval.every": 0, "sample.every": 0},
    **{"checkpoint.every": STEPS, "checkpoint.state_dict": "sharded", "checkpoint.async_save": False},
    **{
        "run.device": "cpu",
        "run.threads": 1,
        "speed.shared_memory": False,
        "optim.name": "adamw",
        "optim.warmup_steps": 0,
    },
}


def measured(ranks: int, folder: Path) -> dict[str, float]:
    """Run a world of this size, and return its counts."""
    report, out = folder / f"{ranks}.json", folder / f"runs-{ranks}"
    options = OPTIONS | {"run.out_dir": out, "run.name": "run", "train.global_batch_size": ranks}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "benchmarks.scale_rank", *(f"--{key}={value}" for key, value in options.items())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COUNTS": str(report)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stderr[-4000:])
    return named(json.loads(report.read_text(encoding="utf-8")), out / "run")


def named(counts: dict[str, dict[str, float]], run: Path) -> dict[str, float]:
    """Return a run's counts by their names in the table."""
    [checkpoint] = (run / "checkpoints").glob("step-*")
    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "rank_losses" in line]
    steps = STEPS - 1

    def count(phase: str, what: str) -> float:
        return counts[phase].get(what, 0) / (steps if phase == "step" else 1)

    return {
        "start: requests of rank 0 to the store": count("start", "requests"),
        "start: collectives": count("start", "collectives"),
        "start: bytes in collectives": count("start", "bytes"),
        "step: collectives": count("step", "collectives"),
        "step: bytes of the all-reduce of sums": count("step", "float64"),
        "save: collectives": count("save", "collectives"),
        "save: bytes in collectives": count("save", "bytes"),
        "save: bytes of pickles": count("save", "pickles"),
        "save: files": len(list(checkpoint.iterdir())),
        "save: bytes of manifest.json": (checkpoint / "manifest.json").stat().st_size,
        "log: bytes of a line": len(lines[-1]),
    }


def law(points: dict[int, float]) -> tuple[float, float, float]:
    """Fit a + b N to points by N. Returns a, b and the largest error relative to the value."""
    b, a = statistics.linear_regression(list(points), list(points.values()))
    return a, b, max(abs(a + b * n - y) / max(y, 1) for n, y in points.items())


def table(found: dict[int, dict[str, float]]) -> Iterator[str]:
    """Yield the table: each quantity by ranks, its law, and the law's values for large worlds."""
    sizes = sorted(found)
    yield f"| on rank 0 | {' | '.join(map(str, sizes))} | law | error | {' | '.join(f'{n:,}' for n in LARGE)} |"
    yield "|---|" + "---:|" * (len(sizes) + 4)
    for name in found[sizes[0]]:
        a, b, off = law({n: found[n][name] for n in sizes})
        formula = f"{a:,.0f} + {b:,.4g} N" if abs(b) > 1e-6 else f"{a:,.0f}"
        cells = [f"{found[n][name]:,.0f}" for n in sizes]
        large = " | ".join(f"{a + b * n:,.0f}" for n in LARGE)
        yield f"| {name} | {' | '.join(cells)} | {formula} | {off:.0%} | {large} |"


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] == ["saves"]:
        from benchmarks import scale_saves

        scale_saves.main()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    given = parser.parse_args()
    print(cpu(), "\n")
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in given.ranks:
            found[ranks] = measured(ranks, Path(folder))
            print(f"{ranks} ranks: done", file=sys.stderr, flush=True)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
