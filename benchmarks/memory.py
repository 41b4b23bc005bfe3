"""Compares a rank's peak memory with the design's figures: `python -m benchmarks.memory`, on 1, 2 and 4 CPU processes.

Measured: the peak bytes of torch's allocator in a step. Expected, for N parameters on W ranks, V vocabulary, D dim:

    shards         4 N / W for parameters, 8 N / W for AdamW's moments, float32
    activations    tensors that autograd saves by the end of forward; the chunked loss saves the gradients of the head's
                   input and matrix, and no logits
    head           2 V D: the gathered matrix
    a chunk        logits, softmax in float32, its gradient, and the matmul added to the matrix's gradient

The peak is at the end of forward: gradients are allocated afterwards, while activations are freed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import train
from benchmarks.contenders import Shape, training_of
from tests.forkserver import free_port
from torchtitan_lite.config.schema import RunConfig
from torchtitan_lite.cpu.loss import CHUNK
from torchtitan_lite.distributed.process_group import exit_process, process_group
from torchtitan_lite.distributed.sharding import own_part
from torchtitan_lite.run.session import Session
from torchtitan_lite.tools.dry_run import peak_of

ROOT = Path(__file__).parent.parent
MIB = 2**20


def held(t: Session) -> int:
    """Return the bytes of this rank's shards of parameters and moments."""
    moments = [v for state in t.optimizer.state.values() for v in state.values() if v.ndim]
    return sum(own_part(tensor)[0].nbytes for tensor in (*t.model.parameters(), *moments))


def peak_of_a_step(t: Session) -> int:
    """Return one step's peak bytes, including the shards."""
    before = held(t)
    return before + peak_of(lambda: train.train_step(t, t.state.step + 1))


def kept_for_backward(t: Session) -> int:
    """Return the bytes that autograd saves in a step's forward, without parameters."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and not isinstance(tensor, torch.nn.Parameter):
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    own = {buffer.untyped_storage().data_ptr() for buffer in t.model.buffers()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train.train_step(t, t.state.step + 1)
    return sum(storages.values())


def promised(t: Session, shape: Shape, world_size: int) -> dict[str, int]:
    """Return the expected bytes by kind."""
    n = sum(p.numel() for p in t.model.parameters())
    width = shape.torch_dtype.itemsize
    matrix, logits = shape.vocab_size * shape.dim, CHUNK * shape.vocab_size
    return {
        "shards": 12 * n // world_size,
        "activations": kept_for_backward(t),
        "head": width * matrix,
        "a chunk": logits * (4 + 2 * width) + width * matrix,
    }


def rank() -> None:
    """Measure on one rank, and print the result."""
    shape = Shape(**json.loads(sys.argv[2]))
    with process_group(RunConfig(device="cpu", threads=1)) as world:
        t = training_of(shape, world, {})
        train.train_step(t, 1)
        parts = promised(t, shape, world.world_size)
        peak = peak_of_a_step(t)
        if world.rank == 0:
            print(json.dumps({"peak": peak, **parts}), flush=True)
    exit_process()


def measure(n: int, shape: dict[str, Any]) -> dict[str, int]:
    """Run n ranks, and return rank 0's result."""
    world = {"WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, "-m", "benchmarks.memory", "rank", json.dumps(shape)]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {k: str(v) for k, v in (world | {"RANK": i, "LOCAL_RANK": i}).items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(n)
    ]
    said = [process.communicate()[0] for process in processes]
    return json.loads(said[0].splitlines()[-1])


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["rank"]:
        rank()
    print("| ranks | vocabulary | shards | activations | head | a chunk | promised MiB | measured MiB | ratio |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for vocab_size in (8192, 32768):
        for n in (1, 2, 4):
            found = measure(n, {"vocab_size": vocab_size})
            peak = found.pop("peak")
            cells = " | ".join(f"{value / MIB:,.1f}" for value in found.values())
            total = sum(found.values())
            ratio = f"{total / MIB:,.1f} | {peak / MIB:,.1f} | {peak / total:.3f}"
            print(f"| {n} | {vocab_size:,} | {cells} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
