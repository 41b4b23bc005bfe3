"""What must stay constant or linear as runs grow: `python -m benchmarks.growth [--steps N] [--plot FILE]`.

Runs train.py with a tiny model on one process and prints, and plots, milliseconds per step over a long run, with few
and many log lines, and by size of the corpus; seconds to the first step by size of the corpus and by step of the
resume; and milliseconds per step by parameters and tokens.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import svg
from torchtitan_lite.config.schema import ModelConfig

ROOT = Path(__file__).parent.parent
Points = list[tuple[float, float]]
TINY = {"model.dim": 32, "model.n_layers": 2, "model.n_heads": 2, "train.seq_len": 64, "model.max_seq_len": 64}
WIDE = {"model.dim": 128, "model.n_layers": 4, "model.n_heads": 4, "train.seq_len": 256, "model.max_seq_len": 256}
MEGABYTES = (1, 10, 100)


def corpus(folder: Path, megabytes: int) -> Path:
    """Random words, prepared with a token for each byte."""
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 9))) for _ in range(5000)]
    lines = [json.dumps({"text": " ".join(generator.choices(words, k=150))}) for _ in range(1000)]
    block = "\n".join(lines) + "\n"
    source, out = folder / f"{megabytes}.jsonl", folder / f"prepared-{megabytes}"
    source.write_text(block * max(megabytes * 10**6 // len(block), 1))
    command = [sys.executable, "-m", "torchtitan_lite.data.prepare", str(source), "--out", str(out)]
    subprocess.run([*command, "--tokenizer", "bytes"], cwd=ROOT, check=True, capture_output=True)
    source.unlink()
    return out


def train(folder: Path, data: Path, steps: int, **more: Any) -> tuple[list[dict[str, Any]], float]:
    """Run train.py to this step. Returns the records that it adds, and the seconds to the first of them."""
    values = {"train.steps": steps, "optim.warmup_steps": 2, "optim.schedule": "constant", "run.device": "cpu"} | TINY
    values |= {"data.path": data, "run.out_dir": folder.parent, "run.name": folder.name, "run.threads": 1}
    values |= {"train.micro_batch_size": 4, "train.global_batch_size": 4, "eval.every": 0, "sample.every": 0}
    values |= {"checkpoint.every": 0, "log.every": 1, "optim.name": "adamw"} | {
        key.replace("__", "."): value for key, value in more.items()
    }
    metrics = folder / "metrics.jsonl"
    known = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
    before = time.time()
    command = [sys.executable, "train.py", *(f"--{key}={value}" for key, value in values.items())]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    records = [json.loads(line) for line in metrics.read_text().splitlines()[known:]]
    records = [record for record in records if "tokens_per_second" in record]
    return records, records[0]["time"] - before


def step_ms(records: list[dict[str, Any]], tokens_per_step: int) -> float:
    """The median, in milliseconds, of all but the first tenth."""
    kept = records[len(records) // 10 + 1 :]
    return statistics.median(1000 * tokens_per_step / record["tokens_per_second"] for record in kept)


def in_the_course(records: list[dict[str, Any]], tokens_per_step: int, windows: int = 25) -> Points:
    """Milliseconds per step in windows of a run."""
    size = max(len(records) // windows, 1)
    parts = [records[i : i + size] for i in range(0, len(records) - size + 1, size)]
    times = [1000 * tokens_per_step / statistics.median(r["tokens_per_second"] for r in part) for part in parts]
    return [(part[-1]["step"], ms) for part, ms in zip(parts, times, strict=True)]


def long_runs(folder: Path, data: Path, steps: int) -> dict[str, Points]:
    """One run of so many steps with ten log lines a hundred steps, and one with a line for each."""
    found = {}
    for name, every in (("a line every 10 steps", 10), ("a line every step", 1)):
        records, _ = train(folder / (f"long-{steps}" if every > 1 else "lines"), data, steps, log__every=every)
        found[name] = in_the_course(records, 256)
    return found


def resumes(folder: Path, data: Path, at: list[int]) -> Points:
    """Seconds to the first step after a resume, by the step; the median of three."""
    points: Points = []
    for step in at:
        run = folder / f"long-{step}"
        if not run.is_dir():
            train(run, data, step, log__every=max(step // 10, 1))
        times = []
        for i in range(3):
            again = folder / f"again-{step}-{i}"
            shutil.copytree(run, again)
            times.append(train(again, data, step + 1)[1])
        points.append((step, statistics.median(times)))
    return points


def sizes(folder: Path, data: Path, make: Callable[[int], dict[str, Any]], values: list[int]) -> list[float]:
    """Milliseconds per step of the wider model with other values, interleaved; the median of three runs each."""
    found: dict[int, list[float]] = {value: [] for value in values}
    for i in range(3):
        for value in values:
            wanted = {key.replace(".", "__"): v for key, v in (WIDE | make(value)).items()}
            tokens = wanted.get("train__global_batch_size", 4) * WIDE["train.seq_len"]
            records, _ = train(folder / f"size-{value}-{i}", data, 20, **wanted)
            found[value].append(step_ms(records, tokens))
        for value in values:
            shutil.rmtree(folder / f"size-{value}-{i}")
    return [statistics.median(times) for times in found.values()]


def parameters(n_layers: int) -> float:
    """Millions, of the blocks of the wider model."""
    config = ModelConfig(dim=128, n_layers=n_layers, n_heads=4)
    return n_layers * (4 * 128**2 + 3 * 128 * config.dim_of_ffn + 2 * 128) / 1e6


def plot(file: Path, panels: dict[tuple[str, str, str], dict[str, Points]]) -> None:
    """One panel for each: its title, its axes, and its lines."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for axis, ((title, x, y), lines) in zip(axes.flat, panels.items(), strict=True):
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set(title=title, xlabel=x, ylabel=y)
        axis.set_ylim(0, 1.1 * max(y for points in lines.values() for _, y in points))
        axis.locator_params(nbins=5)
        if len(lines) > 1:
            axis.legend()
    note = "Time per step and to the first step of a tiny model on one process. Medians without error bars."
    svg.save(figure, file, "What stays constant and what grows with a run", note)


def main() -> None:
    """Measure, print, plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help="of the long runs")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/growth.svg")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpora = {megabytes: corpus(folder, megabytes) for megabytes in MEGABYTES}
        by_corpus: Points = []
        first_by_corpus: Points = []
        for megabytes, data in corpora.items():
            runs = [train(folder / f"corpus-{megabytes}-{i}", data, 200) for i in range(3)]
            by_corpus.append((megabytes, statistics.median(step_ms(records, 256) for records, _ in runs)))
            first_by_corpus.append((megabytes, statistics.median(seconds for _, seconds in runs)))
        data = corpora[MEGABYTES[0]]
        layers, batches = [2, 4, 8, 16], [2, 4, 8, 16]
        by_layers = sizes(folder, data, lambda n: {"model.n_layers": n}, layers)
        by_batch = sizes(folder, data, lambda n: dict.fromkeys(MICRO, n), batches)
        panels: dict[tuple[str, str, str], dict[str, Points]] = {
            ("In the course of a run", "step", "ms per step"): long_runs(folder, data, given.steps),
            ("Size of the corpus", "MB", "ms per step"): {"": by_corpus},
            ("To the first step", "MB of corpus", "s"): {"": first_by_corpus},
            ("To the first step after a resume", "at step", "s"): {"": resumes(folder, data, [10, 500, given.steps])},
            ("Parameters", "M in blocks", "ms per step"): {
                "": [(parameters(n), ms) for n, ms in zip(layers, by_layers, strict=True)]
            },
            ("Tokens", "tokens in a step", "ms per step"): {
                "": [(n * WIDE["train.seq_len"], ms) for n, ms in zip(batches, by_batch, strict=True)]
            },
        }
    print(f"load {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end")
    for (title, x, y), lines in panels.items():
        for line, points in lines.items():
            shown = points if len(points) < 6 else [points[0], points[len(points) // 2], points[-1]]
            values = "; ".join(f"{at:,.4g}: {value:.3g}" for at, value in shown)
            print(f"| {title}{': ' + line if line else ''} | {x} | {y} | {values} |")
    plot(given.plot, panels)
    print(f"plotted in {given.plot}")


MICRO = "train.micro_batch_size", "train.global_batch_size"

if __name__ == "__main__":
    main()
