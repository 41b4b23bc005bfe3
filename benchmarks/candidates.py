"""Optimizations that were tried for a CPU step, kept or not: `python -m benchmarks.candidates [part ...]`.

Prints the least of several CPU times of forward and backward on one core, in milliseconds, and a profile of a step by
operator on one rank.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import train
from benchmarks.contenders import Shape, training_of
from benchmarks.machine import cpu
from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.cpu import attention as block_attention
from torchtitan_lite.cpu import fused, shared_memory
from torchtitan_lite.cpu import loss as head
from torchtitan_lite.cpu.widened import slow_dtypes
from torchtitan_lite.distributed.process_group import exit_process, process_group
from torchtitan_lite.models.attention import attend
from torchtitan_lite.models.llama import rotate
from torchtitan_lite.models.loss import summed_cross_entropy

SHAPE = Shape()
BF16, TIMES = torch.bfloat16, 7
# a CPU without bfloat16 instructions computes in float32 (widened products)
DTYPES = (torch.float32,) if "bfloat16" in slow_dtypes() else (BF16, torch.float32)


def core_ms(compute: Callable[[], Tensor]) -> float:
    """The least CPU time of a forward and backward, in milliseconds."""
    out = compute()
    gradient = torch.ones_like(out)
    spent = []
    for _ in range(TIMES):
        before = time.process_time()
        compute().backward(gradient)
        spent.append(time.process_time() - before)
    return 1000 * min(spent)


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Small normal values that require a gradient."""
    return (torch.randn(*shape) * 0.05).to(dtype).requires_grad_()


def show(name: str, plain: float, others: dict[str, float]) -> None:
    """Print a row: the plain variant, and the others with their ratio to it."""
    cells = "; ".join(f"{other} {ms:.1f} ({plain / ms:.2f})" for other, ms in others.items())
    print(f"| {name} | {plain:.1f} | {cells} |", flush=True)


def attention() -> None:
    """PyTorch's kernel and block_attention with several block sizes."""
    for dtype in DTYPES:
        for length in (256, 512, 1024, 2048):
            q, k, v = (leaf(4, length, SHAPE.n_heads, SHAPE.dim // SHAPE.n_heads, dtype=dtype) for _ in range(3))
            found = {}
            for block in (64, 128, 256):
                block_attention.BLOCK = dict.fromkeys((2, 4), block)
                found[f"blocks of {block}"] = core_ms(
                    lambda q=q, k=k, v=v: block_attention.block_attention(q, k, v)  # type: ignore[misc]
                )
            plain = core_ms(lambda q=q, k=k, v=v: attend(q, k, v))  # type: ignore[misc]
            show(f"attention, {str(dtype)[6:]}, {length} tokens", plain, found)


def loss() -> None:
    """Full logits and chunks of several sizes."""
    for dtype in DTYPES:
        x, weight = leaf(4, SHAPE.seq_len, SHAPE.dim, dtype=dtype), leaf(SHAPE.vocab_size, SHAPE.dim, dtype=dtype)
        targets = torch.randint(SHAPE.vocab_size, (4, SHAPE.seq_len))
        found = {}
        for chunk in (64, 128, 256, 512, 2048):
            head.CHUNK = chunk // 2 if dtype == torch.float32 else chunk
            found[f"chunks of {chunk}"] = core_ms(lambda: head.chunked_cross_entropy(x, weight, targets))  # noqa: B023
        plain = core_ms(lambda: summed_cross_entropy(F.linear(x, weight), targets))  # noqa: B023
        show(f"output matrix and loss, {str(dtype)[6:]}", plain, found)


def fused_matrices() -> None:
    """Products with the same input, merged into one (not adopted)."""
    x = leaf(4 * SHAPE.seq_len, SHAPE.dim)
    qkv = [leaf(SHAPE.dim, SHAPE.dim) for _ in range(3)]
    plain = core_ms(lambda: torch.stack([F.linear(x, w) for w in qkv], 1))
    show("wq, wk, wv", plain, {"as one": core_ms(lambda: F.linear(x, torch.cat(qkv)))})
    gates = [leaf(SHAPE.hidden_dim, SHAPE.dim) for _ in range(2)]

    def separate() -> Tensor:
        one, other = (F.linear(x, w) for w in gates)
        return F.silu(one) * other

    def fused() -> Tensor:
        one, other = F.linear(x, torch.cat(gates)).chunk(2, -1)
        return F.silu(one) * other

    show("w1, w3", core_ms(separate), {"as one": core_ms(fused)})


def small_operators() -> None:
    """Rotary positions and RMSNorm from PyTorch's operators, and fused."""
    angles = torch.rand(SHAPE.seq_len, SHAPE.dim // SHAPE.n_heads // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    for dtype in DTYPES:
        x = leaf(4, SHAPE.seq_len, SHAPE.n_heads, SHAPE.dim // SHAPE.n_heads, dtype=dtype)
        few = core_ms(lambda: fused.rotate(x, cos, sin))  # noqa: B023
        plain = core_ms(lambda: rotate(x, cos, sin))  # noqa: B023
        show(f"rotary positions of queries, {str(dtype)[6:]}", plain, {"few passes": few})
        norm, wide = nn.RMSNorm(SHAPE.dim, 1e-5).to(dtype), leaf(4 * SHAPE.seq_len, SHAPE.dim, dtype=dtype)
        plain = core_ms(lambda: norm(wide))  # noqa: B023
        fused.fuse_norms(norm)
        show(f"RMSNorm, {str(dtype)[6:]}", plain, {"few passes": core_ms(lambda: norm(wide))})  # noqa: B023


def collectives() -> None:
    """All-gather and reduce-scatter of one block on two ranks, by TCP and by shared memory."""
    with process_group(RunConfig(device="cpu", threads=1)) as world:
        group: Any = dist.group.WORLD
        shared = shared_memory.SharedMemory(group)
        n = SHAPE.dim * (4 * SHAPE.dim + 3 * SHAPE.hidden_dim)
        part, whole = torch.randn(n // 2).to(BF16), torch.empty(n, dtype=BF16)
        gradient, total = torch.randn(n), torch.empty(n // 2)
        gather, reduce = shared_memory.AllGather(shared), shared_memory.ReduceScatter(shared)
        ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "all-gather of a block, bfloat16": (
                lambda: shared_memory._all_gather(whole, part, group),
                lambda: gather(whole, part, group),
            ),
            "reduce-scatter of a block, float32": (
                lambda: dist.reduce_scatter_tensor(total, gradient),
                lambda: reduce(total, gradient, group, dist.ReduceOp.SUM),
            ),
        }
        for name, pair in ways.items():
            found = []
            for way in pair:
                spent = []
                for _ in range(TIMES):
                    dist.barrier()
                    before = time.perf_counter()
                    for _ in range(10):
                        way()
                    spent.append((time.perf_counter() - before) / 10)
                found.append(1000 * min(spent))
            if world.rank == 0:
                show(name, found[0], {"shared memory": found[1]})
    exit_process()


def step() -> None:
    """A step's operators by self time."""
    with process_group(RunConfig(device="cpu", threads=1)) as world:
        t = training_of(SHAPE, world, {})
        for number in (1, 2):
            train.train_step(t, number)
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            train.train_step(t, 3)
        events = sorted(trace.key_averages(), key=lambda e: -e.self_cpu_time_total)
        total = sum(event.self_cpu_time_total for event in events)
        print(f"\none step of {4 * SHAPE.seq_len} tokens, one rank: {total / 1000:,.0f} ms")
        for event in events[:16]:
            print(f"| `{event.key}` | {event.self_cpu_time_total / total:.1%} | {event.count} |")
    exit_process()


PARTS = {"attention": attention, "loss": loss, "matrices": fused_matrices, "small": small_operators}


def main() -> None:
    """Print all, or the parts that are named."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{cpu()}; torch {torch.__version__}, one thread, load {os.getloadavg()[0]:.1f}\n")
    print("| | plain, ms | others, ms (how many times as fast) |\n|---|---:|---|")
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
    if sys.argv[1:]:
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    subprocess.run([*launcher, "benchmarks.candidates", "collectives"], check=True)
    block_attention.BLOCK, head.CHUNK = {2: 128, 4: 64}, 256
    step()


if __name__ == "__main__":
    collectives() if sys.argv[1:] == ["collectives"] else main()
