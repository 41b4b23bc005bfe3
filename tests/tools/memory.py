"""Configs whose memory is planned in one process and measured in others.

`python -m tests.tools.memory RESULTS.json` measures all of them on a GPU.
"""

import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import train
from torchtitan_lite.config import load
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.schema import Config, RunConfig
from torchtitan_lite.distributed.fsdp import before_micro_batch
from torchtitan_lite.distributed.initialize import materialize
from torchtitan_lite.distributed.process_group import Process, build_mesh, exit_process, process_group, sum_over_ranks
from torchtitan_lite.optim.optimizer import build_optimizer, clip_factor, gradient_norms, squared_norm
from torchtitan_lite.tools.dry_run import own_bytes, peak_of

VOCABULARY = 2048
BASE = {
    "model.size": "1M",
    "train.seq_len": 256,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 8,
    "optim.name": "adamw",
}
BF16 = {"fsdp.param_dtype": "bfloat16"}
SELECTIVE = {"activation_checkpointing.mode": "selective"}
FULL = {"activation_checkpointing.mode": "full"}
GPT = {"model.family": "gpt", "model.max_seq_len": 512}
T5 = {"model.family": "t5", "data.objective": "span_corruption", "train.seq_len": 64}

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, bfloat16, selective": BF16 | SELECTIVE,
    "llama, selective": SELECTIVE,
    "llama, full": FULL,
    "llama, full, every other of 6": FULL | {"activation_checkpointing.every": 2, "model.n_layers": 6},
    "llama, wide, accumulating": BF16 | {"model.dim": 384, "train.micro_batch_size": 2, "fsdp.grad_sync": "last"},
    "gpt": GPT | {"model.size": "3M", "train.seq_len": 128},
    "gpt, dropout, long": GPT | {"model.dropout": 0.1, "train.seq_len": 512, "optim.name": "sgd"},
    "t5": T5,
    "experts": {"model.family": "qwen3_moe"},
    "gated DeltaNet": {"model.family": "olmo_hybrid"},
    "HSDP, muon, averages": {"fsdp.dp_replicate": 2, "optim.name": "muon", "optim.ema_decay": 0.9},
    "tied, bfloat16, prefetching": BF16 | {"model.tie_embeddings": True, "fsdp.explicit_prefetching": True},
}
EXTENDED = (
    *("llama, bfloat16, selective", "llama, selective", "llama, full, every other of 6", "t5", "gated DeltaNet"),
    *("experts", "tied, bfloat16, prefetching"),
)
HYBRID = ("HSDP, muon, averages",)  # on four ranks, the others on one and on two
# these have not been measured on a GPU
GPU_CASES = [name for name in CASES if name not in (*HYBRID, "t5", "experts", "gated DeltaNet")]
SLOW = "llama", "llama, full", "gpt", "llama, wide, accumulating", "gpt, dropout, long"

# on a GPU: so much that the workspace of cuBLAS does not matter
LARGE = {"train.micro_batch_size": 64, "train.global_batch_size": 128}


def config_of(name: str, world_size: int, **more: Any) -> Config:
    return config_with(CASES[name] | more, world_size)


def config_with(values: dict[str, Any], world_size: int) -> Config:
    return load.load(None, BASE | values, world_size=world_size, n_gpus=8).config


def peaks_of(process: Process, configs: Sequence[Config]) -> list[int]:
    """The most bytes that one step of each config takes on this rank. Collective."""
    peaks = []
    for config in configs:
        peaks.append(_peak_of_step(process, config))
        gc.collect()
        if process.device.type == "cuda":
            torch.cuda.empty_cache()
    return peaks


def _peak_of_step(process: Process, config: Config) -> int:
    """Bytes on the CPU by the events of the allocator, on CUDA by its own peak.

    On the CPU, parameters and state are counted, then what a step allocates beyond them. The allocations that gloo's
    threads free are not seen, so a figure of several ranks may be too high: the lowest of some steps counts.
    """
    layout = derive(config, process.world_size)
    model = train.sharded_model(config, VOCABULARY, build_mesh(config.fsdp, process.device))
    materialize(model, process.device, 0)
    optimizer = build_optimizer(model, config.optim)
    shapes = [(config.train.micro_batch_size, length) for length in (config.input_len, config.target_len)]

    def step() -> None:
        for i in range(layout.grad_accum_steps):
            inputs, targets = (torch.zeros(shape, dtype=torch.int64, device=process.device) for shape in shapes)
            before_micro_batch(model, config.fsdp, last=i == layout.grad_accum_steps - 1)
            model(inputs, targets).backward()
        norm = (
            sum_over_ranks(squared_norm(gradient_norms(model), layout.dp_replicate).to(process.device)).sqrt().float()
        )
        optimizer.multiply_gradients(clip_factor(norm, config.optim.max_norm, torch.ones_like(norm)))
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    if process.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    before = own_bytes((*model.parameters(), *model.buffers(), *state))
    return before + min(peak_of(step) for _ in range(3))


def main(argv: Sequence[str]) -> int:
    with process_group(RunConfig(device="cuda", threads=1)) as process:
        peaks = peaks_of(process, [config_of(name, 1, **LARGE) for name in GPU_CASES])
    Path(argv[0]).write_text(json.dumps(dict(zip(GPU_CASES, peaks, strict=True))))
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
