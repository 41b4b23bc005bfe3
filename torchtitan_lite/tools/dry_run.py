"""`train.py --dry-run`: three steps of the real run on all ranks, a look at the disk and the clocks of all machines,
and a table of planned and measured values. Keeps no files but prepared data.

All batches have one shape, so three steps are enough: the first compiles and allocates persistent memory, the second
measures memory, and the third is timed.
"""

import contextlib
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel

from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.process_group import process_group
from torchtitan_lite.distributed.ranks import gather, on_rank0
from torchtitan_lite.errors import ConfigError, StuckError
from torchtitan_lite.monitoring import mfu, run_folder
from torchtitan_lite.monitoring.console import batch_line, fsdp_line, model_line
from torchtitan_lite.monitoring.metrics import Log
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.process import env_int
from torchtitan_lite.terminal import counted, duration, size
from torchtitan_lite.tools.allocator import own_bytes, peak_of
from torchtitan_lite.tools.columns import columns
from torchtitan_lite.tools.estimate import step_time
from torchtitan_lite.tools.estimate.planned_run import Plan, make_plan
from torchtitan_lite.tools.estimate.simulate import GRADIENTS, OPTIMIZER, PARAMETERS
from torchtitan_lite.training import out_of_memory
from torchtitan_lite.training.session import Session, settle
from torchtitan_lite.training.start_and_end import require_agreement

Step = Callable[[Session, int], StepRecord]
STEPS = 3
CLOCKS_S = 2.0  # torchrun compares heartbeats of 5 s (docs/cluster.md) by the clocks of the machines
TOTAL = "total at the peak"


@contextlib.contextmanager
def elsewhere(loaded: Loaded) -> Iterator[Loaded]:
    """The same run from step 0 in a temporary folder, which is kept only if a rank hangs: it then holds the stacks."""
    config = loaded.config
    largest = config.train.batch_size(config.train.steps)
    last: dict[str, Any] = {"global_batch_size": largest, "batch_schedule": []}
    folder = tempfile.mkdtemp(prefix="dry-run-")
    parts: dict[str, BaseModel] = {
        "run": config.run.model_copy(update={"out_dir": folder}),
        "train": config.train.model_copy(update={"steps": max(config.train.steps, STEPS)} | last),
        "checkpoint": config.checkpoint.model_copy(update={"resume": ""}),
    }
    try:
        yield replace(loaded, config=config.model_copy(update=parts))
    finally:
        if not isinstance(sys.exception(), StuckError):
            shutil.rmtree(folder, ignore_errors=True)


def planned(config: Config, vocab_size: int, world_size: int) -> Plan:
    """The plan for the device that this process would use. Call it before there is a process group."""
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
        first = env_int("RANK", 0) == 0  # only rank 0 prints, and needs the plan
        plan = planned(loaded.config, data.vocab_size, env_int("WORLD_SIZE", 1)) if first else None
        with process_group(config.run) as world:
            require_agreement(loaded.config, data, world)
            with contextlib.closing(build(config, data, world, Log(config.folder, speaks=first))) as session:
                n_bytes, step_s = measure(session, step)
                machines = checked_machines(loaded.config.folder, session)
            if plan is not None:
                print(machines)
                print(compare(plan, n_bytes, step_s, loaded.config.folder))


def checked_machines(folder: Path, s: Session) -> str:
    """Check the disk of a run and the clocks of all machines. Collective. Returns a line about them.

    Raises:
        UserError: on every rank.
    """
    s.services.checkpointer.folder = folder / "checkpoints"
    s.services.checkpointer.require_space(0)
    where = next(parent for parent in folder.parents if parent.is_dir())
    file = Path(on_rank0(lambda: tempfile.mkstemp(prefix="dry-run-", dir=where)[1]))
    hosts, seen = gather(socket.gethostname()), gather(file.exists())
    on_rank0(file.unlink)
    blind = list(dict.fromkeys(host for host, sees in zip(hosts, seen, strict=True) if not sees))
    if blind and s.config.checkpoint.state_dict == "sharded":
        raise ConfigError(f"run.out_dir: {where} of rank 0 is not shared: {', '.join(blind)} can't see a file in it")
    dist.barrier()  # the clocks are read at the same time
    clocks = gather(time.time())
    off = {host: clock - clocks[0] for host, clock in zip(hosts, clocks, strict=True)}
    if wrong := ", ".join(f"{host} by {s:+.1f} s" for host, s in off.items() if abs(s) > CLOCKS_S):
        raise ConfigError(f"clocks differ from that of {hosts[0]}: {wrong}. torchrun would take machines for lost")
    machines = counted(len(set(hosts)), "machine")
    seen_by = f"not seen by {', '.join(blind)}" if blind else "shared by all"
    apart = max(clocks) - min(clocks)
    return f"ranks   {len(hosts)} on {machines}; clocks within {apart:.2f} s; {where} has room, and is {seen_by}"


def measure(s: Session, step: Step) -> tuple[dict[str, int], float]:
    """Make and measure three steps. Collective.

    Returns:
        this rank's bytes by kind, where TOTAL is the peak, and the seconds of a step.
    """
    n_bytes: dict[str, int] = {}

    def measure_gradients(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        n_bytes[GRADIENTS] = own_bytes(p.grad for p in parameters if p.grad is not None)

    def make(number: int) -> None:
        s.services.watchdog.step(number)
        step(s, number).loss.item()  # reading the loss waits for the device

    s.trained.optimizer.register_step_pre_hook(measure_gradients)
    with s.services.watchdog.naming_lost_ranks(), out_of_memory.with_advice(s.config):
        make(1)
        n_bytes[PARAMETERS] = own_bytes((*s.trained.model.parameters(), *s.trained.model.buffers()))
        n_bytes[OPTIMIZER] = own_bytes(v for state in s.trained.optimizer.state.values() for v in state.values())
        if s.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            make(2)
            n_bytes[TOTAL] = torch.cuda.max_memory_allocated()
        elif s.world.rank == 0:
            n_bytes[TOTAL] = n_bytes[PARAMETERS] + n_bytes[OPTIMIZER] + peak_of(lambda: make(2))
        else:
            make(2)
        before = time.perf_counter()
        make(STEPS)
        step_s = time.perf_counter() - before
    settle(s)
    return n_bytes, step_s


def compare(plan: Plan, n_bytes: dict[str, int], step_s: float, folder: Path) -> str:
    """A table of planned and measured values: see `measure`."""
    config, layout, steps = plan.config, plan.layout, plan.config.train.steps
    # gradients are measured when the optimizer steps, which need not be the peak
    planned_bytes = {**plan.simulated.peak, GRADIENTS: plan.simulated.peaks["optimizer"][GRADIENTS]}
    planned_bytes[TOTAL] = sum(plan.device_bytes.values())
    unmeasured = [kind for kind in plan.simulated.peak if kind not in n_bytes]
    rows = [("memory of rank 0", "planned", "measured", "")]
    for kind in (PARAMETERS, OPTIMIZER, GRADIENTS, *unmeasured, TOTAL):
        expected, real = planned_bytes[kind], n_bytes.get(kind)
        ratio = f"{real / expected:.2f}" if real and expected else ""
        rows.append((f"  {kind}", size(expected), "" if real is None else size(real), ratio))
    expected_s = 0.0
    if plan.device is not None and not step_time.unknown(plan):
        expected_s = step_time.expected(plan, plan.device).total
    rows += [
        ("time of a step", f"{expected_s:.3f} s" if expected_s else "", f"{step_s:.3f} s", ""),
        (f"{steps:,} steps", duration(expected_s * steps) if expected_s else "", duration(step_s * steps), ""),
        ("tokens per second", "", f"{layout.tokens_per_step / step_s:,.0f}", ""),
    ]
    return "\n".join(
        [
            f"dry run of {folder}: three steps in a temporary folder; the run itself was not changed",
            model_line(config, f"{plan.n_parameters:,} parameters"),
            batch_line(config, layout, plan.world_size),
            f"fsdp    {fsdp_line(config)}",
            "",
            *columns(rows, right=(1, 2, 3)),
            *["(the plan ignores the memory that compiled blocks save)"] * config.compile.enabled,
            *["(the plan is for bfloat16: float8 is not estimated)"] * config.speed.float8,
            "times exclude saves, validations and samples",
        ]
    )
