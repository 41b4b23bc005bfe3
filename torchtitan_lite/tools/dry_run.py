"""`train.py --dry-run`: steps of the real run, and what was planned beside what was measured. Only prepared data stays.

All batches of a run have one shape, so any step is one of the largest. Three are made: the first compiles and takes
memory that stays, in the second memory is measured, the third is timed.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import BaseModel

from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.agreement import require_agreement
from torchtitan_lite.distributed.process_group import env_int, process_group
from torchtitan_lite.errors import StuckError
from torchtitan_lite.monitoring import mfu, run_folder
from torchtitan_lite.monitoring.console import batch_line, duration, fsdp_line, model_line
from torchtitan_lite.monitoring.metrics import Log
from torchtitan_lite.tools.allocator import own_bytes, peak_of
from torchtitan_lite.tools.plan import Plan, make_plan, size
from torchtitan_lite.tools.simulate import GRADIENTS, OPTIMIZER, PARAMETERS
from torchtitan_lite.training import out_of_memory
from torchtitan_lite.training.session import Session, check_previous_step
from torchtitan_lite.training.start import require_same_data

Step = Callable[[Session, int], tuple[torch.Tensor, torch.Tensor]]
STEPS = 3
IN_ALL = "all, at the fullest moment"


@dataclass(frozen=True)
class Measured:
    """What steps of this rank took."""

    bytes: dict[str, int]  # by kind; IN_ALL is the peak
    step_s: float


@contextlib.contextmanager
def elsewhere(loaded: Loaded) -> Iterator[Loaded]:
    """The same run, new and in a folder that goes away, unless a rank hangs: then it holds the stacks."""
    config = loaded.config
    folder = tempfile.mkdtemp(prefix="dry-run-")
    parts: dict[str, BaseModel] = {
        "run": config.run.model_copy(update={"out_dir": folder}),
        "train": config.train.model_copy(update={"steps": max(config.train.steps, STEPS)}),
        "checkpoint": config.checkpoint.model_copy(update={"resume": "never"}),
    }
    keep = False
    try:
        yield replace(loaded, config=config.model_copy(update=parts))
    except StuckError:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def planned(config: Config, vocab_size: int, world_size: int) -> Plan:
    """The plan for the device that this process would take. To be made before there is a process group."""
    on_gpu = config.run.device != "cpu" and torch.cuda.is_available()
    device = mfu.named(torch.cuda.get_device_name()) if on_gpu else None
    model = config.model.model_copy(update={"vocab_size": config.model.vocab_size or vocab_size})
    return make_plan(config.model_copy(update={"model": model}), world_size, device, on_gpu=on_gpu)


def run(loaded: Loaded, data: DataSet, build: Callable[..., Session], step: Step) -> None:
    """Build, make three steps, and print the table.

    Args:
        build: `train.build`.
        step: `train.train_step`.
    """
    with elsewhere(loaded) as there:
        config = there.config
        run_folder.make(config.folder)
        first = env_int("RANK", 0) == 0  # it prints, and the others need no plan
        plan = planned(loaded.config, data.vocab_size, env_int("WORLD_SIZE", 1)) if first else None
        with process_group(config.run) as world:
            require_agreement(loaded.config, world)
            require_same_data(config, data, world)
            with contextlib.closing(build(config, data, world, Log(config.folder, speaks=first))) as t:
                measured = measure(t, step)
            if plan is not None:
                print(compare(plan, measured, loaded.config.folder))


def measure(t: Session, step: Step) -> Measured:
    """Make three steps; every rank has to."""
    found: dict[str, int] = {}

    def look(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found[GRADIENTS] = own_bytes(p.grad for p in parameters if p.grad is not None)

    def make(number: int) -> None:
        t.watchdog.step(number)
        step(t, number)[0].item()  # reading the loss waits for the device

    t.optimizer.register_step_pre_hook(look)
    with t.watchdog.explained(), out_of_memory.explained(t.config):
        make(1)
        found[PARAMETERS] = own_bytes((*t.model.parameters(), *t.model.buffers()))
        found[OPTIMIZER] = own_bytes(v for state in t.optimizer.state.values() for v in state.values())
        if t.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            make(2)
            found[IN_ALL] = torch.cuda.max_memory_allocated()
        elif t.world.rank == 0:
            found[IN_ALL] = found[PARAMETERS] + found[OPTIMIZER] + peak_of(lambda: make(2))
        else:
            make(2)
        before = time.perf_counter()
        make(STEPS)
        seconds = time.perf_counter() - before
    check_previous_step(t)
    return Measured(found, seconds)


def compare(plan: Plan, measured: Measured, folder: Path) -> str:
    """The plan beside the measurement, as a table."""
    config, layout, kinds = plan.config, plan.layout, plan.simulated.peak
    rows = [("memory of rank 0", "planned", "measured", "")]
    for kind in (PARAMETERS, OPTIMIZER, GRADIENTS, *(k for k in kinds if k not in measured.bytes), IN_ALL):
        # gradients: what is held when the optimizer steps, which need not be the fullest moment
        guess = sum(plan.device_bytes.values()) if kind == IN_ALL else _of(plan, kind)
        real = measured.bytes.get(kind)
        ratio = f"{real / guess:.2f}" if real and guess else ""
        rows.append((f"  {kind}", size(guess), "" if real is None else size(real), ratio))
    least = f"at least {plan.least_s(plan.device):.3f} s" if plan.device else ""
    rows.append(("time of a step", least, f"{measured.step_s:.3f} s", ""))
    steps = config.train.steps
    least = f"at least {duration(plan.least_s(plan.device) * steps)}" if plan.device else ""
    rows.append((f"{steps:,} steps", least, duration(measured.step_s * steps), ""))
    rows.append(("tokens per second", "", f"{layout.tokens_per_step / measured.step_s:,.0f}", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = ["  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3))]) for row in rows]
    return "\n".join(
        [
            f"dry run of {folder}: three steps were made and forgotten; the run itself was not touched",
            model_line(config, f"{plan.n_parameters:,} parameters"),
            batch_line(config, layout, plan.world_size),
            f"fsdp    {fsdp_line(config)}",
            "",
            *(line.rstrip() for line in table),
            *["(the plan does not count what compiled blocks save)"] * config.compile.enabled,
            "saves, validations and samples come on top of the time",
        ]
    )


def _of(plan: Plan, kind: str) -> int:
    peaks = plan.simulated.peaks
    return peaks["optimizer"][kind] if kind == GRADIENTS else plan.simulated.peak[kind]
