"""`train.py --dry-run`: runs three steps on all ranks, and prints a table of planned and measured values.

Also checks the disk and the clocks of all machines, and measures the rates of all ranks and links. Keeps no files
except prepared data. All batches have one shape, so three steps are enough: the first compiles and allocates persistent
memory, the second measures memory, and the third is timed.
"""

import contextlib
import functools
import gc
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from torchtitan_lite.config.schema import Config
from torchtitan_lite.config.toml import Loaded
from torchtitan_lite.data.dataset import DataSet
from torchtitan_lite.distributed.exchange import values_of_ranks
from torchtitan_lite.distributed.process_group import Process, process_group
from torchtitan_lite.environment import env_int
from torchtitan_lite.errors import ConfigError, StuckError
from torchtitan_lite.optim.step_record import StepRecord
from torchtitan_lite.run import mfu, out_of_memory
from torchtitan_lite.run.console import batch_line, fsdp_line, model_line
from torchtitan_lite.run.metrics import Log
from torchtitan_lite.run.session import Session, check_previous_step
from torchtitan_lite.run.start_and_end import require_agreement, require_shared
from torchtitan_lite.terminal import columns, counted, duration, size
from torchtitan_lite.tools.estimate import planned_run
from torchtitan_lite.tools.estimate.planned_run import Plan, make_plan

Step = Callable[[Session, int], StepRecord]
STEPS = 3
CLOCKS_S = 2.0  # maximum difference: torchrun compares heartbeats of 5 s by the machines' clocks (docs/cluster.md)


def planned(config: Config, vocab_size: int, world_size: int) -> Plan:
    """Plan for the device that this process would use. Call it before there is a process group."""
    on_gpu = config.run.device != "cpu" and torch.cuda.is_available()
    device = mfu.named(torch.cuda.get_device_name()) if on_gpu else None
    known = config.changed({"model.vocab_size": config.model.vocab_size or vocab_size})
    return make_plan(known, world_size, device, on_gpu=on_gpu)


@contextlib.contextmanager
def in_temporary_folder(config: Config, changes: Mapping[str, Any]) -> Iterator[Config]:
    """Change values by "section.key", and use a temporary folder; kept only if a rank hangs, for its stacks."""
    folder = tempfile.mkdtemp(prefix="torchtitan-lite-")
    changed = config.changed({"run.out_dir": folder, "run.remote": "", **changes})
    try:
        changed.folder.mkdir(parents=True)
        yield changed
    finally:
        if not isinstance(sys.exception(), StuckError):
            shutil.rmtree(folder, ignore_errors=True)


def run(loaded: Loaded, data: DataSet, build: Callable[..., Session], step: Step) -> None:
    """Build the session, run three steps, and print the table.

    Args:
        build: `train.build`.
        step: `train.train_step`.
    """
    train = loaded.config.train
    changes = {
        "train.global_batch_size": train.batch_size(train.steps),
        "train.batch_schedule": [],
        "train.steps": max(train.steps, STEPS),
        "checkpoint.resume": "",
    }
    with in_temporary_folder(loaded.config, changes) as config:
        first = env_int("RANK", 0) == 0  # only rank 0 prints, and needs the plan
        plan = planned(loaded.config, data.vocab_size, env_int("WORLD_SIZE", 1)) if first else None
        with process_group(config.run) as process:
            require_agreement(loaded.config, data, process)
            speeds = speed_lines(process)  # before the model takes the memory
            with contextlib.closing(build(config, data, process, Log(config.folder, enabled=first))) as session:
                n_bytes, step_s = measure(session, step)
                machines = check_machines(loaded.config.folder, session, shared=not loaded.config.run.remote)
            if plan is not None:
                print("\n".join([machines, *speeds, ""]))
                print(compare(plan, n_bytes, step_s, loaded.config.folder))


def check_machines(folder: Path, s: Session, *, shared: bool = True) -> str:
    """Check the disk of a run and the clocks of all machines, and return a line about them. Collective.

    Raises:
        UserError: on every rank.
    """
    s.checkpointer.folder = folder / "checkpoints"
    s.checkpointer.require_space()
    if shared:
        require_shared(folder, s.config)
    hosts = values_of_ranks(socket.gethostname())
    dist.barrier()  # the clocks are read at the same time
    clocks = values_of_ranks(time.time())
    off = {host: clock - clocks[0] for host, clock in zip(hosts, clocks, strict=True)}
    if wrong := ", ".join(f"{host} by {s:+.1f} s" for host, s in off.items() if abs(s) > CLOCKS_S):
        raise ConfigError(f"clocks differ from that of {hosts[0]}: {wrong}. torchrun would consider machines lost")
    machines = counted(len(set(hosts)), "machine")
    return f"ranks   {len(hosts)} on {machines}; clocks within {max(clocks) - min(clocks):.2f} s; the disk has room"


def speed_lines(process: Process) -> list[str]:
    """Time matmuls on each rank, and all-gathers within and between machines. Collective.

    Returns:
        a table of the lowest, median and highest rate of all ranks, and of the ranks 10 % below the median.
    """
    rank, hosts, on_gpu = process.rank, values_of_ranks(socket.gethostname()), process.device.type == "cuda"
    n, n_bytes = (8192, 256 << 20) if on_gpu else (1024, 16 << 20)
    matrix = torch.ones(n, n, dtype=torch.bfloat16 if on_gpu else torch.float32, device=process.device)
    rates = {"matmul, TFLOP/s": 2e-12 * n**3 / seconds_of(lambda: matrix @ matrix)}
    number = [hosts[:i].count(host) for i, host in enumerate(hosts)]  # of each rank on its machine
    for place, same in (("within", hosts), ("between", number)):
        members = [i for i, each in enumerate(same) if each == same[rank]]
        group = dist.new_group(members, use_local_synchronization=True)
        if len(members) > 1:
            part = torch.empty(n_bytes // len(members), dtype=torch.uint8, device=process.device)
            whole = part.new_empty(len(members) * len(part))
            seconds = seconds_of(functools.partial(dist.all_gather_into_tensor, whole, part, group))
            rates[f"all-gather {place} machines, GB/s"] = 1e-9 * len(part) * (len(members) - 1) / seconds
    rows, found = [("", "lowest", "median", "highest", "below the median by 10 %")], values_of_ranks(rates)
    for name in dict.fromkeys(name for of_rank in found for name in of_rank):
        of_ranks = {i: of_rank[name] for i, of_rank in enumerate(found) if name in of_rank}
        low, middle, high = min(of_ranks.values()), statistics.median(of_ranks.values()), max(of_ranks.values())
        slow = [f"rank {i} ({hosts[i]}) {rate:.3g}" for i, rate in of_ranks.items() if rate < 0.9 * middle]
        rows.append((name, f"{low:.3g}", f"{middle:.3g}", f"{high:.3g}", ", ".join(slow) or "none"))
    return columns(rows, right=(1, 2, 3))


def seconds_of(compute: Callable[[], object]) -> float:
    """Return the median time of five calls. Waits for the device."""
    timer = Timer("compute()", globals={"compute": compute}, num_threads=torch.get_num_threads())
    return statistics.median(timer.timeit(1).mean for _ in range(5))  # each after two others


def measure(s: Session, step: Step) -> tuple[int, float]:
    """Run three steps. Collective.

    Returns:
        this rank's peak memory in bytes (on a CPU only on rank 0), and the seconds of a step.
    """

    def run_step(number: int) -> None:
        s.watchdog.step(number)
        step(s, number).loss.item()  # reading the loss waits for the device

    n_bytes = 0
    with s.watchdog.training(), out_of_memory.with_advice(s.config):
        run_step(1)
        if s.process.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            run_step(2)
            n_bytes = torch.cuda.max_memory_allocated()
        elif s.process.rank == 0:
            state = [value for values in s.optimizer.state.values() for value in values.values()]
            n_bytes = own_bytes((*s.model.parameters(), *s.model.buffers(), *state)) + peak_of(lambda: run_step(2))
        else:
            run_step(2)
        before = time.perf_counter()
        run_step(STEPS)
        step_s = time.perf_counter() - before
    check_previous_step(s)
    return n_bytes, step_s


def peak_of(compute: Callable[[], object]) -> int:
    """Return the peak bytes that `compute` adds to existing allocations, from PyTorch's CPU allocator events."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler
    gc.collect()  # garbage freed during `compute` would be subtracted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        compute()
    assert trace.profiler is not None
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def own_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's shards. Shared storage, such as a group's gradients, is counted once."""
    own = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in own}.values())


def compare(plan: Plan, n_bytes: int, step_s: float, folder: Path) -> str:
    """Return a table of planned and measured values; see `measure`."""
    config, layout, steps = plan.config, plan.layout, plan.config.train.steps
    planned_bytes = sum(plan.device_bytes.values())
    expected_s = 0.0
    if plan.device is not None and not planned_run.why_unknown(plan):
        expected_s = planned_run.expected(plan, plan.device).total
    rows = [
        ("", "planned", "measured"),
        ("memory of rank 0 at the peak", size(planned_bytes), size(n_bytes)),
        ("time of a step", f"{expected_s:.3f} s" if expected_s else "", f"{step_s:.3f} s"),
        (f"{steps:,} steps", duration(expected_s * steps) if expected_s else "", duration(step_s * steps)),
        ("tokens per second", "", f"{layout.tokens_per_step / step_s:,.0f}"),
    ]
    return "\n".join(
        [
            f"dry run of {folder}: three steps in a temporary folder; the run itself was not changed",
            model_line(config, f"{plan.n_parameters:,} parameters"),
            batch_line(config, layout, plan.world_size),
            f"fsdp    {fsdp_line(config)}",
            "",
            *columns(rows, right=(1, 2)),
            *["(the plan ignores the memory that compiled blocks save)"] * config.compile.enabled,
            *["(the plan is for bfloat16: float8 is not estimated)"] * config.speed.float8,
            "times exclude saves, validations and samples",
        ]
    )
