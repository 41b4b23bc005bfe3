"""Resident memory of the default run by kind, on one process: `python -m benchmarks.resident`.

VmRSS of /proc/self/status after each phase, the lines in the order of a start. The tensors of a step are what `plan`
promises: parameters, optimizer state, gradients and the peak of activations. What is left beyond them after the steps
is the allocator's: freed blocks that it keeps, and code that the first step loads.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 2**20
STEPS = 20


def resident() -> int:
    """Bytes of this process that lie in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def main() -> None:
    """Run the phases in this process, and print a line for each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found: list[tuple[str, int]] = [("Python", resident())]

    def phase(name: str) -> None:
        found.append((name, resident()))

    import torch.distributed.fsdp
    import torch.distributed.tensor

    phase("torch with FSDP and DTensor")
    import torch._dynamo  # as the first fully_shard does

    phase("torch._dynamo, which fully_shard imports")
    import train

    phase("our modules")
    step = train.train_step

    def train_step(session: Any, n: int) -> Any:
        if n == 1:
            phase("data, model, optimizer and threads before the first step")
        return step(session, n)

    train.train_step = train_step  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--run.device=cpu",
            "--optim.name=adamw",
            f"--run.out_dir={folder}",
            "--eval.every=0",
            "--sample.every=0",
        ]
        options += [f"--train.steps={STEPS}", "--optim.warmup_steps=0", "--run.threads=1", "--run.name=run"]
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        code = train.main(options)
        sys.stdout = sys.__stdout__
    if code:
        sys.exit(code)
    phase(f"{STEPS} steps and a save")
    from torchtitan_lite.config.schema import Config
    from torchtitan_lite.tools.estimate.simulate import simulate

    torch.distributed.destroy_process_group()
    promised = sum(simulate(Config(), 1, 4096, on_gpu=False).peak.values())
    print("| | MiB more |\n|---|---:|")
    for (_, before), (name, after) in zip([("", 0), *found], found, strict=False):
        print(f"| {name} | {(after - before) / MIB:.0f} |")
    total, imports = found[-1][1], found[1][1]
    print(f"| all | {total / MIB:.0f} |\n| of these the tensors that `plan` promises | {promised / MIB:.0f} |")
    print(f"| beyond the imports of torch with FSDP and these tensors | {(total - imports - promised) / MIB:.0f} |")


if __name__ == "__main__":
    main()
