"""Start-up and logging overhead of the default experiment on two processes: `python -m benchmarks.overhead [rounds]`.

Start-up: seconds from `torchrun train.py` to its first step, compared with a torchrun that only imports torch with FSDP
and DTensor, and with one that also shards a layer: `fully_shard` imports torch._dynamo. The same for `python train.py`.
The data is prepared beforehand.
Recording: the time spent in logging, recording and the watchdog, as a share of the time of the steps.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_lite.distributed.process_group import exit_process

ROOT = Path(__file__).parent.parent
IMPORTS = "import torch, torch.distributed.fsdp, torch.distributed.tensor"
NOW = "import os, time\nif os.environ.get('RANK', '0') == '0': print('NOW', time.time(), flush=True)\n"
SHARD = """
world = torch.distributed.HashStore(), 0, 1  # of its own: what is compared is starting the process
torch.distributed.init_process_group("gloo", store=world[0], rank=world[1], world_size=world[2])
with torch.device("meta"):
    layer = torch.nn.Linear(8, 8)
torch.distributed.fsdp.fully_shard(layer, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
"""
BARE = {"imports": f"{IMPORTS}\n{NOW}", "a sharded layer": f"{IMPORTS}\n{SHARD}\n{NOW}"}
RECORDS = {
    "torchtitan_lite.training.callbacks": ("log_step",),
    "torchtitan_lite.training.session": ("report_save",),
    "torchtitan_lite.training.start": ("report_end",),
    "torchtitan_lite.monitoring.metrics.Log": ("info", "record", "start_bar", "advance_bar", "close"),
    "torchtitan_lite.monitoring.watchdog.Watchdog": ("step", "computing", "forward"),
    "torchtitan_lite.monitoring.profiler.Profile": ("begin", "end"),
    "torchtitan_lite.monitoring.metrics.Meter": ("lap",),
    "torchtitan_lite.monitoring.run_folder": ("write_status", "facts"),
}
STEPS = 60


def first_step() -> None:
    """Run train.py up to the start of its first step, and print the time."""
    import train  # not by the parent, whose time is not measured

    def now(*_: Any) -> Any:
        if os.environ.get("RANK", "0") == "0":
            print("NOW", time.time(), flush=True)
        raise KeyboardInterrupt

    train.train_step = now  # type: ignore[assignment]
    train.main(sys.argv[2:])
    os._exit(0)


def recording() -> None:
    """Run train.py and sum the time of its recording calls."""
    import importlib

    import train

    spent, depth = [0.0], [0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            before = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:  # calls within calls are counted once
                    spent[0] += time.perf_counter() - before

        return call

    for where, names in RECORDS.items():
        module, _, kind = where.rpartition(".") if where[where.rfind(".") + 1].isupper() else (where, "", "")
        owner = getattr(importlib.import_module(module), kind) if kind else importlib.import_module(module)
        for name in names:
            setattr(owner, name, timed(getattr(owner, name)))
    train_step, steps = train.train_step, [0.0]

    def step(*args: Any) -> Any:
        before, already = time.perf_counter(), spent[0]
        result = train_step(*args)
        steps[0] += time.perf_counter() - before - (spent[0] - already)
        return result

    train.train_step = step  # type: ignore[assignment]
    code = train.main(sys.argv[2:])
    if os.environ.get("RANK", "0") == "0":
        print("SHARE", spent[0] / steps[0], flush=True)
    exit_process(code)


def number_after(word: str, command: list[str]) -> float:
    """The number after a word in the output of a command."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    found = [line.split()[1] for line in result.stdout.splitlines() if line.startswith(word + " ")]
    if not found:
        raise RuntimeError(result.stdout + result.stderr)
    return float(found[0])


def seconds_to(command: list[str]) -> float:
    before = time.time()
    return number_after("NOW", command) - before


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if sys.argv[1:] else 5
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        scripts = [Path(folder, f"{name.split()[-1]}.py") for name in BARE]
        for script, text in zip(scripts, BARE.values(), strict=True):
            script.write_text(text)
        new = iter(range(10**6))

        def options() -> list[str]:
            return [f"--run.out_dir={folder}", f"--run.name={next(new)}", "--run.device=cpu"]

        module = ["-m", "benchmarks.overhead"]
        seconds_to([sys.executable, *module, "first-step", *options()])  # prepares the data
        compared = " | ".join(f"{name} | ratio (range)" for name in BARE)
        print(f"| seconds, median of {rounds} interleaved | to the first step | {compared} |")
        print("|---" + "|---:" * (1 + 2 * len(BARE)) + "|")
        for name, launcher in (("python", [sys.executable]), ("torchrun, 2 processes", torchrun)):
            commands = [[*launcher, *module, "first-step"], *([*launcher, str(script)] for script in scripts)]
            found = [
                [seconds_to([*c, *(options() if "first-step" in c else [])]) for c in commands] for _ in range(rounds)
            ]
            mine, *others = zip(*found, strict=True)
            cells = [f"{statistics.median(mine):.2f}"]
            for theirs in others:
                ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
                cells += [f"{statistics.median(theirs):.2f}"]
                cells += [f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
        steps = [f"--train.steps={STEPS}", "--eval.every=0", "--sample.every=0", "--checkpoint.every=0"]
        for every in (10, 1):
            command = [*torchrun, *module, "recording", *options(), *steps, f"--log.every={every}"]
            shares = [number_after("SHARE", [*command, f"--run.name=recording-{every}-{i}"]) for i in range(3)]
            print(
                f"recording, a line every {every} steps of {STEPS}: {statistics.median(shares):.2%} of the time of the "
                f"steps ({min(shares):.2%} to {max(shares):.2%})",
                flush=True,
            )


if __name__ == "__main__":
    {"first-step": first_step, "recording": recording}.get("".join(sys.argv[1:2]), main)()
