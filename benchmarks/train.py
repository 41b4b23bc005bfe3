"""Tokens per second of several frameworks: `make bench`, or `python -m benchmarks.train`.

It measures three shapes in float32 and bfloat16, a few minutes each. --shapes, --dtypes and --only select among them
and add deeper and larger models.

Every contender (contenders.py) is built once. Then they take turns of a few steps, in a different order each round,
together with a matmul as the practical peak. So a ratio compares turns within the same half minute, and other load on
the machine affects both. Prints a table for docs/lab with medians and quartiles. On a busy machine use the ratio by CPU
time, which excludes waiting, also for other ranks.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import CONTENDERS, EXTRA, GROWTH, MATMULS, SHAPES, STAND_INS, WIDENED, Shape, missing
from benchmarks.machine import cpu
from tests.forkserver import free_port
from torchtitan_lite.cpu.float32_matmuls import slow_dtypes
from torchtitan_lite.environment import usable_cores

ROOT = Path(__file__).parent.parent
OURS = "torchtitan_lite"
DTYPES = "float32", "bfloat16"
GROUP = 4  # contenders that run at the same time as ours; each takes about 2 GB
# float32: without bf16 instructions a bf16 matmul takes fifty times as long
SMOKE = Shape(
    dim=32,
    hidden_dim=64,
    n_layers=2,
    n_heads=2,
    n_kv_heads=2,
    vocab_size=300,
    seq_len=40,
    micro_batch_size=2,
    dtype="float32",
    roof=64,
)
SMOKE_CONTENDERS = [OURS, "bare FSDP2 loop", "DDP", "roof"]


class Ranks:
    """The processes of one contender."""

    def __init__(self, name: str, shape: Shape, n: int, device: str) -> None:
        threads = max(usable_cores() // n, 1)
        world = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        world |= {"OMP_NUM_THREADS": threads, "BENCHMARK_DEVICE": device, "TORCHELASTIC_RUN_ID": "benchmark"}
        world |= {"ACCELERATE_USE_CPU": str(device == "cpu").lower(), "HF_HUB_OFFLINE": 1}
        command = [sys.executable, "-m", "benchmarks.contenders", name, json.dumps(asdict(shape))]
        self._processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {k: str(v) for k, v in (world | {"RANK": rank, "LOCAL_RANK": rank}).items()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(n)
        ]

    def wait(self) -> None:
        """Wait until the model is built."""
        self._answer("ready")

    def run(self, steps: int) -> dict[str, float]:
        """Take a turn. Returns seconds, peak_mib and before_mib."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return self._answer("seconds")

    def _answer(self, key: str) -> dict[str, Any]:
        """Return rank 0's next line with this key; libraries may print other lines."""
        out = self._processes[0].stdout
        assert out is not None
        for line in out:
            if line.startswith("{") and key in (said := json.loads(line)):
                return said
        sys.exit(f"{' '.join(self._processes[0].args[1:4])} ended early; its output is above")  # type: ignore

    def close(self) -> None:
        """Close standard input, which ends the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(timeout=600)


@dataclass
class Measured:
    """One contender's timings by round."""

    rates: list[float] = field(default_factory=list)  # tokens/s over all ranks; for the roof, FLOP/s
    core_rates: list[float] = field(default_factory=list)  # the same by CPU time, which excludes waiting
    peak_mib: float = 0.0  # rank 0's, beyond the memory after the imports


def measure(
    shape: Shape, names: list[str], n: int, device: str, *, rounds: int, seconds: float
) -> tuple[dict[str, Measured], list[float]]:
    """Run all contenders in turns. Also returns the machine's load at each round."""
    ranks = {name: Ranks(name, shape, n, device) for name in names}
    steps = {}
    for name, waiting in ranks.items():
        waiting.wait()
        waiting.run(2)  # compilation, the allocators, the first collectives
        steps[name] = max(round(seconds / rounds / waiting.run(1)["cpu_s"]), 1)
    found, loads = {name: Measured() for name in names}, []
    for i in range(rounds):
        order = list(names)
        random.Random(i).shuffle(order)
        for name in order:
            turn = ranks[name].run(steps[name])
            work = 2 * shape.roof**3 * MATMULS if name == "roof" else shape.micro_batch_size * shape.seq_len
            found[name].rates.append(n * steps[name] * work / turn["seconds"])
            found[name].core_rates.append(n * steps[name] * work / turn["cpu_s"])
            found[name].peak_mib = turn["peak_mib"] - turn["before_mib"]
        loads.append(os.getloadavg()[0])
        print(f"round {i + 1} of {rounds}, load {loads[-1]:.1f}", file=sys.stderr, flush=True)
    for waiting in ranks.values():
        waiting.close()
    return found, loads


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return lower quartile, median and upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def over(these: list[float], those: list[float]) -> list[float]:
    """Return the ratios by round."""
    return [one / other for one, other in zip(these, those, strict=True)]


def pairs(these: Measured, those: Measured) -> list[tuple[list[float], list[float]]]:
    """Return the rates by wall-clock time and by CPU time."""
    return [(these.rates, those.rates), (these.core_rates, those.core_rates)]


def spread(values: list[float], form: str = ".2f") -> str:
    """Format the median and quartiles."""
    low, middle, high = (format(value, form) for value in quartiles(values))
    return f"{middle} ({low} to {high})"


HEADER = [
    "| | tokens/s | ours / this | the same by core time | peak MiB | share of the roof | the same by core time |",
    "|---|---:|---:|---:|---:|---:|---:|",
]


def rows(shape: Shape, found: dict[str, Measured], *, first: bool) -> list[str]:
    """Return the table's rows for a group of contenders, with our ratio to each; the first group includes ours."""
    lines = []
    ours, roof = found[OURS], found["roof"]
    for name, its in found.items():
        if name == "roof" or (name == OURS and not first):
            continue
        ratio, by_cores = (
            ("1", "1") if its is ours else (spread(over(mine, theirs)) for mine, theirs in pairs(ours, its))
        )
        flops = shape.flops_per_token()
        share, share_by_cores = (flops * quartiles(over(a, b))[1] for a, b in pairs(its, roof))
        lines.append(
            f"| {name} | {spread(its.rates, ',.0f')} | {ratio} | {by_cores} | {its.peak_mib:,.0f} "
            f"| {share:.0%} | {share_by_cores:.0%} |"
        )
    what = f"*matmul of two {shape.roof} x {shape.roof} in these rounds, GFLOP/s*"
    lines.append(f"| {what} | {spread([rate / 1e9 for rate in roof.rates], ',.0f')} | | | | 100% | 100% |")
    return lines


def versions() -> str:
    """Return the versions of Python and all contenders' packages."""
    found = [f"Python {platform.python_version()}"]
    for package in ("torch", "transformers", "lightning-fabric", "accelerate"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(found)


def compare(name: str, shape: Shape, names: list[str], n: int, device: str, *, rounds: int, seconds: float) -> None:
    """Measure one shape in one dtype, and print its table."""
    print(
        f"**{name}, {shape.dtype}**: {shape.flops_per_token() / 1e6:.1f} MFLOP per token (6 (N - N_embedding) + "
        f"12 L H Q T), {shape.flops_per_token(causal=True) / 1e6:.1f} with causal attention counted once.\n{shape}\n"
    )
    others = [other for other in names if other not in (OURS, "roof")]
    table, loads = list(HEADER), []
    for i in range(0, max(len(others), 1), GROUP):
        group = [OURS, *others[i : i + GROUP], "roof"]
        found, more = measure(shape, group, n, device, rounds=rounds, seconds=seconds)
        table += rows(shape, found, first=i == 0)
        loads += more
    print("\n".join(table))
    print(f"\nload {min(loads):.1f} to {max(loads):.1f}, {rounds} rounds\n", flush=True)


def contenders_for(asked: list[str], *, smoke: bool) -> list[str]:
    """Return the contenders to run. Prints which are left out, and why."""
    wanted = SMOKE_CONTENDERS if smoke else [OURS, *asked, "roof"]
    if not asked and not smoke:
        wanted = [name for name in CONTENDERS if name not in (*EXTRA, *STAND_INS.values())]
    names = []
    for name in wanted:
        needed, instead = missing(name), STAND_INS.get(name, "")
        if not needed:
            names.append(name)
            continue
        runs = f"; {instead} runs in its place" if instead and not missing(instead) else ""
        print(f"left out: {name}, which needs {' and '.join(needed)} (make bench installs them){runs}\n")
        names += [instead] * bool(runs)
    return [name for name in CONTENDERS if name in names]


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="of processor time of each contender and rank, in all rounds together",
    )
    parser.add_argument("--ranks", type=int, default=0, help="0: 2, or the number of GPUs")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=[*SHAPES, *GROWTH])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--only", nargs="*", choices=list(CONTENDERS), help="instead of all; ours and the roof always")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: does it run?")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n = given.ranks or (torch.cuda.device_count() if device == "cuda" else 2)
    where = torch.cuda.get_device_name() if device == "cuda" else cpu()
    print(f"{n} processes on {where}; {versions()}; load {os.getloadavg()[0]:.1f}\n")
    names = contenders_for(given.only or [], smoke=given.smoke)
    if given.smoke:
        compare("smoke", SMOKE, names, n, device, rounds=2, seconds=0.1)
        return
    for name in given.shapes:
        for dtype in given.dtypes:
            if device == "cpu" and dtype in slow_dtypes():
                print(f"left out: {name} in {dtype}. This CPU has no instructions for it: the others take 20 times as")
                print("long as in float32. Ours computes its matmuls in float32, and is in the table for float32\n")
                continue
            shape = replace((SHAPES | GROWTH)[name], dtype=dtype)
            widened = [WIDENED] * (device == "cpu" and dtype == "float32" and "bfloat16" in slow_dtypes())
            measured = list(dict.fromkeys([*names, *widened]))
            compare(name, shape, measured, n, device, rounds=given.rounds, seconds=given.seconds)


if __name__ == "__main__":
    main()
