"""The most memory that one step takes, measured, for each case: `torchrun plan_worker.py RESULTS.json DEVICE`.

On the CPU by the events of the allocator, on CUDA by its own peak. Parameters and state are counted, then what a step
holds beyond them. What gloo's own threads free is not seen, so that a figure of two ranks may be high: the lowest of
some steps counts.
"""

import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import train
from tests.tools.memory_cases import CASES, LARGE, VOCABULARY, config_of
from torchtitan_lite.config.derive import derive
from torchtitan_lite.config.schema import Config, RunConfig
from torchtitan_lite.distributed.initialize import materialise
from torchtitan_lite.distributed.parallelize import before_micro_batch
from torchtitan_lite.distributed.process_group import World, build_mesh, exit_process, process_group, sum_over_ranks
from torchtitan_lite.optim.optimizer import build_optimizer, clip_gradients, squared_norm
from torchtitan_lite.tools.allocator import own_bytes, peak_of


def measure(config: Config, world: World) -> int:
    layout = derive(config, world.world_size)
    model = train.sharded_model(config, VOCABULARY, build_mesh(layout, world.device))
    materialise(model, world.device, 0)
    optimizer = build_optimizer(model, config.optim)
    shape = config.train.micro_batch_size, config.train.seq_len

    def step() -> None:
        for i in range(layout.grad_accum_steps):
            tokens = torch.zeros(shape, dtype=torch.int64, device=world.device)
            before_micro_batch(model, config.fsdp, last=i == layout.grad_accum_steps - 1)
            model(tokens, tokens).backward()
        norm = sum_over_ranks(squared_norm(model, layout.dp_replicate).to(world.device)).sqrt().float()
        clip_gradients(optimizer, norm, config.optim.max_norm, torch.ones((), device=world.device))
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated()
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    before = own_bytes((*model.parameters(), *model.buffers(), *state))
    return before + min(peak_of(step) for _ in range(3))


def main(argv: Sequence[str]) -> int:
    out, device = Path(argv[0]), argv[1]
    with process_group(RunConfig.model_validate({"device": device, "threads": 1})) as world:
        found = {}
        for name in argv[2:] or CASES:
            found[name] = measure(config_of(name, world.world_size, **(LARGE if device == "cuda" else {})), world)
            gc.collect()
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
        if world.rank == 0:
            out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
