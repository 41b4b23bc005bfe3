"""Where a step's time goes: `python -m benchmarks.step_profile [--contender NAME] [--dtype bfloat16]`.

Trains each shape of benchmarks.train on two ranks. torch's profiler on rank 0 divides the step by operator and by what
called it; "Python" is what no operator accounts for. The shares are of wall time without waiting for the other rank, so
other load adds noise but no bias. They are multiplied by the processor time of a step without the profiler.

To stand in for a CPU without AVX512: MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.contenders import CONTENDERS, SHAPES
from benchmarks.machine import cpu
from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.cpu.barrier import Barrier
from torchtitan_lite.distributed.process_group import exit_process, process_group

PRODUCTS = "aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_"
# what an operator belongs to: the first of these that is in the name of it, or of what called it, from inside outwards
PARTS = {
    "waiting": "waiting",
    "_ChunkedCrossEntropy": "loss",
    "log_softmax": "loss",
    "LogSoftmax": "loss",
    "nll_loss": "loss",
    "NllLoss": "loss",
    "_BlockAttention": "attention",
    "scaled_dot_product": "attention",
    "ScaledDotProduct": "attention",
    "_RMSNorm": "norms",
    "rms_norm": "norms",
    "RmsNorm": "norms",
    "_Rotate": "rotary positions",
    "silu": "SwiGLU",
    "Silu": "SwiGLU",
    "Optimizer.step": "optimizer",
    "FSDP::": "FSDP: copies",
    "norm": "gradient norm",
}


def part_of(event: Any) -> str:
    """The part of a step that an operator belongs to."""
    at = event
    while at is not None:
        for mark, part in PARTS.items():
            if mark in at.name:
                product = event.name in PRODUCTS and part in ("loss", "attention")
                return f"{part}: products" if product else part
        at = at.cpu_parent
    return "linear layers" if event.name in PRODUCTS else "other operators"


def shares(step: Callable[[], None], steps: int) -> Counter[str]:
    """The share of each part in the time without waiting."""
    _mark_waiting()
    step()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for _ in range(steps):
            with record_function("step"):
                step()
    found: Counter[str] = Counter()
    for event in trace.events():
        root = event
        while root.cpu_parent is not None:
            root = root.cpu_parent
        if root.name == "step":
            part = part_of(event)
            python = "::" not in event.name or event.name.startswith(("FSDP::", "autograd::"))
            found["Python" if python and part != "waiting" else part] += event.self_cpu_time_total
    del found["waiting"]
    total = sum(found.values())
    return Counter({part: spent / total for part, spent in found.items()})


def _mark_waiting() -> None:
    """Name the time in collectives."""

    def marked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function("waiting"):
                return function(*args, **kwargs)

        return call

    for owner, name in ((dist, "barrier"), (dist, "all_reduce"), (Barrier, "wait")):
        setattr(owner, name, marked(getattr(owner, name)))


def core_ms(step: Callable[[], None], seconds: float) -> tuple[int, float]:
    """Steps that take so many seconds of this process, and the milliseconds of one."""
    step()
    before, steps = time.process_time(), 0
    while time.process_time() - before < seconds or steps < 2:
        step()
        steps += 1
        done = torch.tensor(float(time.process_time() - before >= seconds))
        dist.broadcast(done, 0)
        if done:
            break
    return steps, 1000 * (time.process_time() - before) / steps


def rank() -> None:
    """Profile each shape on this rank; rank 0 prints the table."""
    name, dtype, seconds = sys.argv[2], sys.argv[3], float(sys.argv[4])
    found, times = {}, {}
    with process_group(RunConfig(device="cpu", threads=1)) as world:
        for shape_name, shape in SHAPES.items():
            step = CONTENDERS[name](replace(shape, dtype=dtype), world)
            steps, times[shape_name] = core_ms(step, seconds)
            found[shape_name] = shares(step, steps)
        if world.rank == 0:
            print(f"{name}, {dtype}, 2 ranks, one thread each: {cpu()}; torch {torch.__version__}; ", end="")
            print(f"load {os.getloadavg()[0]:.1f}. Milliseconds of one core in a step, and the share\n")
            print("| | " + " | ".join(SHAPES) + " |\n|---|" + "---:|" * len(SHAPES))
            parts = sum(found.values(), Counter())
            for part in sorted(parts, key=lambda part: -parts[part]):
                cells = (f"{times[s] * found[s][part]:,.1f} ({found[s][part]:.1%})" for s in SHAPES)
                print(f"| {part} | " + " | ".join(cells) + " |")
            print("| sum | " + " | ".join(f"{ms:,.0f}" for ms in times.values()) + " |", flush=True)
    exit_process()


def main() -> None:
    """Start two ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", default="torchtitan_lite", choices=list(CONTENDERS))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=5.0, help="of processor time for each shape")
    given = parser.parse_args()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    ours = ["benchmarks.step_profile", "rank", given.contender, given.dtype, str(given.seconds)]
    subprocess.run([*launcher, *ours], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)


if __name__ == "__main__":
    rank() if sys.argv[1:2] == ["rank"] else main()
