"""Collectives on more ranks than cores: `python -m benchmarks.ranks [files] [ranks ...]`, by default 2, 4 and 8.

With `files`, the most files that gloo's groups keep open on a rank, each used for a barrier and an exchange of values.
Otherwise prints the median wall time of a collective through gloo and through shared memory, in rounds that alternate,
and rank 0's CPU time. The ranks share this machine's cores, so a wall time covers the work of all of them, and the
wake-ups.
"""

import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import Shape
from benchmarks.machine import cpu
from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.cpu import shared_memory
from torchtitan_lite.distributed.agreement import from_all_ranks
from torchtitan_lite.distributed.process_group import exit_process, process_group, untimed_group

ROUNDS, TOGETHER_S = 7, 0.05
SHAPE = Shape()
# named differently before torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Pair = tuple[Callable[[], Any], Callable[[], Any]]  # through gloo, and through shared memory


def pairs(ranks: int) -> dict[str, Pair]:
    """By name."""
    group: Any = dist.group.WORLD
    shared = shared_memory.SharedMemory(group)
    gather, reduce = shared_memory.AllGather(shared), shared_memory.ReduceScatter(shared)
    n = SHAPE.dim * (4 * SHAPE.dim + 3 * SHAPE.hidden_dim) // ranks * ranks
    part, whole = torch.randn(n // ranks).bfloat16(), torch.empty(n, dtype=torch.bfloat16)
    gradient, total, copies = torch.randn(n), torch.empty(n // ranks), torch.zeros(n)
    totals = torch.zeros(3 + ranks, dtype=torch.float64)
    return {
        "barrier": (dist.barrier, shared.barrier),
        "all-reduce of a step's totals": (
            lambda: dist.all_reduce(totals),
            lambda: shared_memory.all_reduce(shared, totals),
        ),
        "all-gather of a block, bfloat16": (
            lambda: shared_memory._all_gather(whole, part, group),
            lambda: gather(whole, part, group),
        ),
        "reduce-scatter of a block, float32": (
            lambda: _reduce_scatter(total, gradient),
            lambda: reduce(total, gradient, group, dist.ReduceOp.SUM),
        ),
        "all-reduce of a block, float32": (
            lambda: dist.all_reduce(copies),
            lambda: shared_memory.all_reduce(shared, copies),
        ),
    }


def medians_ms(pair: Pair) -> list[float]:
    """Wall times of both ways, and this process's CPU times."""
    spent: tuple[list[tuple[float, float]], ...] = [], []
    times = 1
    for number in range(ROUNDS + 1):
        for way, found in zip(pair, spent, strict=True):
            dist.barrier()
            before = time.perf_counter(), time.process_time()
            for _ in range(times):
                way()
            after = time.perf_counter(), time.process_time()
            found.append((1000 * (after[0] - before[0]) / times, 1000 * (after[1] - before[1]) / times))
        if number == 0:  # a warm-up, which also says how often to repeat
            box = [max(int(1000 * TOGETHER_S / max(found[-1][0] for found in spent)), 3)]
            dist.broadcast_object_list(box, src=0)
            times = box[0]
    return [statistics.median(one[kind] for one in found[1:]) for kind in range(2) for found in spent]


def join(local_rank: int, ranks: int, port: int) -> None:
    """Set what torchrun would set."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {name: str(ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {name: str(local_rank) for name in ("RANK", "LOCAL_RANK")}


def rank(local_rank: int, ranks: int, port: int) -> None:
    """One of the processes."""
    join(local_rank, ranks, port)
    with process_group(RunConfig(device="cpu", threads=1)):
        for name, pair in pairs(ranks).items():
            gloo, shared, gloo_cpu, shared_cpu = medians_ms(pair)
            if local_rank == 0:
                wall = f"{gloo:.3f} | {shared:.3f} | {gloo / shared:.2f}"
                spent = f"{gloo_cpu:.3f} | {shared_cpu:.3f} | {gloo_cpu / shared_cpu:.2f}"
                print(f"| {name} | {ranks} | {wall} | {spent} |", flush=True)
    exit_process()


def files(local_rank: int, ranks: int, port: int, lazy: bool) -> None:
    """One of the processes: count the open files with two groups, and with a third."""
    join(local_rank, ranks, port)
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    before, found = len(os.listdir("/proc/self/fd")), []
    with process_group(RunConfig(device="cpu", threads=1)) as world:
        for number in range(3):
            group = untimed_group() if number == 2 else (None, world.untimed)[number]
            dist.barrier(group=group)
            from_all_ranks(local_rank, group)
            found.append(len(os.listdir("/proc/self/fd")) - before)
        most = torch.tensor(found if local_rank else [0] * 3)  # rank 0 hosts the store, as torchrun would
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if local_rank == 0:
            print(f"| {ranks} | {'when needed' if lazy else 'at once'} | {most[1]} | {most[2]} |", flush=True)
    exit_process()


def main() -> None:
    """Fork the ranks, which share one import of torch."""
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["files"]:
        print("| ranks | connected | files, two groups | three groups |\n|---:|---|---:|---:|", flush=True)
        for n in map(int, sys.argv[2:] or ("2", "4", "8")):
            for lazy in (False, True):
                fork(files, n, lazy)
        return
    block = SHAPE.dim * (4 * SHAPE.dim + 3 * SHAPE.hidden_dim)
    print(f"{cpu()}; torch {torch.__version__}, load {os.getloadavg()[0]:.1f}; a block has {block:,} parameters\n")
    print("| | ranks | gloo, ms | shared memory, ms | ratio | CPU of rank 0: gloo, ms | shared memory, ms | ratio |")
    print("|---" + "|---:" * 7 + "|", flush=True)
    for ranks in map(int, sys.argv[1:] or ("2", "4", "8")):
        fork(rank, ranks)


def fork(target: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Run the ranks to their end."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=target, args=(i, ranks, port, *arguments)) for i in range(ranks)]
    for process in started:
        process.start()
    for process in started:
        process.join()


if __name__ == "__main__":
    main()
