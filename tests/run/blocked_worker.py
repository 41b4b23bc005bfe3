"""Two ranks, of which one comes late, never, or has ended, and collectives that never give up: `FOLDER CASE`.

The main threads are blocked in C, as under NCCL, whose collectives raise no error: only a thread can end the process.
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from tests.helpers import until
from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.distributed.process_group import process_group, set_group_timeouts
from torchtitan_lite.run import run_folder, watchdog
from torchtitan_lite.run.watchdog import Watchdog

LIMITS = RunConfig(device="cpu", threads=1, timeout_minutes=0.08)
LIMIT_S = 60 * LIMITS.timeout_minutes
START_MINUTES = 0.05
LONG_S = 1.6 * LIMIT_S
SPIN = f"import time; end = time.monotonic() + {LONG_S}\nwhile time.monotonic() < end: pass"


def compile_by(action: Callable[[], object]) -> None:
    """Compile a function, which takes as long as the action."""

    def backend(graph: Any, _: Any) -> Any:
        action()
        return graph.forward

    torch.compile(lambda x: 2 * x, backend=backend)(torch.ones(2))


def stop(store: _distributed_c10d.Store, over: str = "") -> None:
    """SIGSTOP, and SIGCONT after this shell command, by default the end of the other rank."""
    over = over or f"while kill -0 {store.get('pid of rank 0').decode()}; do sleep 0.1; done"
    subprocess.Popen(["sh", "-c", f"{over}; kill -CONT {os.getpid()}"], stderr=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_all(store: _distributed_c10d.Store) -> None:
    """SIGSTOP of both ranks for longer than the limit, as when a laptop sleeps, and some time of watching after it."""

    def beats() -> int:
        return min(json.loads(store.get(watchdog._BEAT.format(rank)))[0] for rank in range(2))

    until(lambda: beats() >= 12, "its first beats")
    both = f"{store.get('pid of rank 0').decode()} {os.getpid()}"
    subprocess.run(["sh", "-c", f"kill -STOP {both}; sleep {LONG_S}; kill -CONT {both}"], check=True)
    seen = beats()
    until(lambda: beats() >= seen + 4, "beats after it")


def leave_early(watching: Watchdog, rank: int) -> None:
    """Rank 1 leaves, and rank 0 still writes for a while, without a sign of life."""
    with watching.training():
        if rank == 0:
            with contextlib.suppress(RuntimeError):
                receive_nothing()  # until rank 1 has ended
            time.sleep(LIMIT_S)
    watching.close()
    print(f"rank {rank} is done", flush=True)
    os._exit(0)


def receive_nothing(_: object = None) -> None:
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())


LATE: dict[str, Callable[[_distributed_c10d.Store], object]] = {
    "compiles": lambda _: compile_by(lambda: exec(SPIN)),
    "compiler hangs": lambda _: compile_by(receive_nothing),
    "was locked": lambda _: time.sleep(LIMIT_S),
    "stops": stop,
    "pauses": lambda store: stop(store, f"sleep {LIMIT_S}"),
    "all pause": stop_all,
}


def main(argv: Sequence[str]) -> int:
    folder, case = Path(argv[0]), argv[1]
    limits = LIMITS.model_copy(update={"timeout_minutes": 60.0, "start_timeout_minutes": START_MINUTES})
    with process_group(LIMITS) as process:
        store = process.store
        assert store is not None
        if process.rank == 0:
            about = {"step": 3, "samples": 0, "config": {}, "setting": {}, "tasks": {}}
            store.set("pid of rank 0", str(os.getpid()))
            run_folder.record_start(folder, about | run_folder.facts(process, [""]))
        held = (folder / "held").open("ab")
        if (case, process.rank) == ("was locked", 1):  # by a process of an earlier attempt, which ends later
            (folder / "stacks").mkdir(exist_ok=True)
            held = (folder / "stacks/rank-1.txt").open("ab")
            fcntl.flock(held, fcntl.LOCK_EX)
        watching = Watchdog(folder, process, LIMITS if case not in ("stops", "pauses", "was locked") else limits)
        held.close()
        watching.on_abort = lambda why: run_folder.record_end(folder, process, 1, "failed", 3, why)
        set_group_timeouts()
        if case != "stops":
            watching.step(3)
            watching.computing()
            watching.step(4)
            if case in ("leaves", "pauses", "was locked"):
                watchdog._STILL_S = watchdog._LOOK_S = LIMIT_S / 20
            if case == "leaves":
                leave_early(watching, process.rank)
            if case != "fetches" or process.rank == 0:
                watching.computing()
        if process.rank == 1:
            LATE.get(case, receive_nothing)(store)
        with watching.training():  # so each leaves with the word that it is no victim, whoever is first
            dist.all_reduce(torch.zeros(1))
        watching.close()
        print(f"rank {process.rank} is done")
    return 0
