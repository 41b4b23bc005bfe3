"""What a sharded save and load cost one rank of many: `python -m benchmarks.scale saves`.

Files have headers, and holes for the tensors. Models are on the meta device, and the process group is a fake one, so
that this process is any rank of a large world: it computes what the rank would. Seconds are CPU seconds; a load's
include reading headers. Headers and manifest are counted in bytes. What ranks send each other is counted in real runs,
by `python -m benchmarks.scale`.
"""

import contextlib
import json
import math
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.testing._internal.distributed.fake_pg import FakeStore

import train
from torchtitan_lite.checkpointing import storage
from torchtitan_lite.checkpointing.safetensors_file import FileRecord, header_of
from torchtitan_lite.checkpointing.shards import INFO, Layout, Reads, layout_of
from torchtitan_lite.checkpointing.tensor_names import by_name, model_tensors, optimizer_tensors
from torchtitan_lite.checkpointing.torch_storage import PartsReader
from torchtitan_lite.config import cli
from torchtitan_lite.distributed.process_group import build_mesh

CASES = [("8b", 64, 1), ("8b", 256, 1), ("8b", 1024, 1), ("8b", 1024, 16), ("70b", 1024, 1), ("70b", 1024, 16)]
HEAD = "model, replicas x shards", "rank", "save", "by DCP", "manifest", "load", "by DCP", "files", "headers read"


def seconds_of(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of an action, and its result."""
    began = time.process_time()
    result = action()
    return time.process_time() - began, result


def tensors_of(name: str, replicas: int) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, on the meta device, as this rank has them."""
    options = {
        "fsdp.dp_replicate": replicas,
        "optim.name": "adamw",
        "speed.shared_memory": "false",
        "run.device": "cpu",
    }
    argv = ["--config", f"configs/llama_{name}.toml", *(f"--{key}={value}" for key, value in options.items())]
    config = cli.parse(argv, world_size=dist.get_world_size(), n_gpus=0).loaded.config
    model = train.sharded_model(config, 128_256, build_mesh(config.fsdp, torch.device("cpu")))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.tensor(0.0), **{k: torch.zeros_like(p) for k in ("exp_avg", "exp_avg_sq")}}
    return by_name(model_tensors(model), optimizer_tensors(model, optimizer))


def header(plan: Layout, rank: int, path: Path) -> int:
    """Write a rank's file, if it has one, with a hole for the tensors. Returns the header's bytes."""
    boxes = plan.of_rank(rank)
    if not boxes:
        return 0
    offsets = {name: {"saved_offsets": [indices.start for indices in box]} for name, box in boxes.items()}
    specs = {name: (plan.specs[name][0], tuple(map(len, box))) for name, box in boxes.items()}
    content, _ = header_of(specs, {INFO: json.dumps(offsets)})
    path.write_bytes(content)
    os.truncate(path, len(content) + sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs.values()))
    return len(content)


def manifest(plan: Layout, folder: Path) -> int:
    """Write the manifest as a commit does, without the files it names. Returns its bytes."""
    records = {plan.file(rank): FileRecord(2**30, "0" * 64) for rank in range(plan.mesh[0] * plan.mesh[1])}
    folder.mkdir()
    content = {"step": 1, "files": {k: asdict(r) for k, r in records.items()}, "layout": asdict(plan)}
    storage._hash_of(content)
    return len(json.dumps(content, indent=2))


def measure(name: str, ranks: int, replicas: int, rank: int) -> list[str]:
    """Return the row of a rank."""
    warnings.filterwarnings("ignore", category=UserWarning)  # of torch's planner about its own functions
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    stack = contextlib.ExitStack()
    try:
        tensors = tensors_of(name, replicas)
        mesh = [replicas, ranks // replicas] if replicas > 1 else [ranks]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_s, plan = seconds_of(lambda: layout_of(tensors, mesh))
        save_s += seconds_of(lambda: header(plan, rank, folder / "own"))[0]
        own = {key: tensors[key] for key in plan.of_rank(rank)}

        def plan_by_dcp() -> None:
            planner = DefaultSavePlanner()
            planner.set_up_planner(own, is_coordinator=True)
            planner.create_global_plan([planner.create_local_plan()])

        manifest_s, n_bytes = seconds_of(lambda: manifest(plan, folder / "step"))
        text = json.dumps(asdict(plan))
        load_s, reads = seconds_of(lambda: Reads(folder, Layout(**json.loads(text)), tensors))
        of = {file: header(plan, int(file[6:11]), folder / file) for file in reads.files}
        load_s += seconds_of(lambda: [storage.read_specs(folder / file) for file in reads.files])[0]

        def load_by_dcp() -> None:
            planner, needed = DefaultLoadPlanner(), {name for parts in reads.files.values() for name, _ in parts}
            metadata = PartsReader(reads).read_metadata()
            planner.set_up_planner({name: tensors[name] for name in needed}, metadata, is_coordinator=True)
            planner.create_global_plan([planner.create_local_plan()])

        return [
            f"{name}, {replicas} x {ranks // replicas}",
            *(str(rank), f"{save_s:.2f}", f"{save_s + seconds_of(plan_by_dcp)[0]:.2f}"),
            f"{manifest_s:.2f} ({n_bytes:,})",
            *(f"{load_s:.2f}", f"{load_s + seconds_of(load_by_dcp)[0]:.2f}", str(len(of)), f"{sum(of.values()):,}"),
        ]
    finally:
        stack.close()
        dist.destroy_process_group()


def main() -> None:
    """Print the table, for rank 0 and another rank."""
    print("CPU seconds of one rank; in brackets and in the last column, bytes\n")
    print(f"| {' | '.join(HEAD)} |\n|---|{'---:|' * (len(HEAD) - 1)}")
    cases = [(name, ranks, replicas, rank) for name, ranks, replicas in CASES for rank in (0, ranks // 2 + 1)]
    # torch keeps names of groups for the life of a process
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        for row in processes.map(measure, *zip(*cases, strict=True)):
            print(f"| {' | '.join(row)} |", flush=True)
