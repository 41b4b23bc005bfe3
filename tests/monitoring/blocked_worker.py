"""Two ranks, of which one never comes, and collectives that never give up: `FOLDER CASE`.

The main threads are blocked in C, as under NCCL, whose collectives raise no error: only a thread can end the process.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.distributed.process_group import process_group
from torchtitan_lite.monitoring import run_folder, watchdog

DAY_MINUTES = 24 * 60
TIMEOUT_MINUTES = 0.08  # of the watchdog


def main(argv: Sequence[str]) -> int:
    folder, case = Path(argv[0]), argv[1]
    setattr(watchdog, "limit_group_timeouts", lambda _: None)  # noqa: B010  # as if it were a day
    with process_group(RunConfig(device="cpu", threads=1, timeout_minutes=DAY_MINUTES)) as world:
        if world.rank == 0:
            about = {"step": 3, "samples": 0, "config": {}, "setting": {}, "tasks": {}}
            run_folder.begin(folder, about | run_folder.facts(world, [""]))
        if case == "same place":  # there NCCL's collectives are pending on all ranks
            world = replace(world, device=torch.device("cuda", world.rank))
        late = 0 if case == "rank 0 fetches" else 1
        watching = watchdog.Watchdog(folder, world, TIMEOUT_MINUTES)
        watching.on_abort = lambda why: run_folder.end(folder, world, 1, "failed", 3, why)
        dist.barrier()  # both exist
        watching.step(4)
        if case in ("same place", "forward pass") or world.rank != late:
            watching.computing()
        if case == "forward pass" and world.rank != late:
            watching.forward()
        other = torch.zeros(1)
        if world.rank == late:
            dist.recv(other, src=1 - late)  # nothing is ever sent
        dist.all_reduce(other)
    return 0
