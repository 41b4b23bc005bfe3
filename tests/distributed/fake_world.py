"""Shards the model of each config file given, on the meta device, over a fake process group of 8 ranks."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from torchtitan_lite import models
from torchtitan_lite.config import load
from torchtitan_lite.distributed.parallelize import apply_fsdp
from torchtitan_lite.distributed.process_group import build_mesh


def main() -> None:
    dist.init_process_group("fake", rank=3, world_size=8)
    for file in sys.argv[1:]:
        config = load.load(Path(file), {}, world_size=8).config
        mesh = build_mesh(config.fsdp, torch.device("cpu"))
        with torch.device("meta"):
            model = models.build(config.model, config.model.vocab_size or config.tokenizer.vocab_size)
        apply_fsdp(model, mesh, config.fsdp)
        total, mine = 0, 0
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert parameter.placements == (Shard(0),), name
            assert parameter.is_meta, name
            total += parameter.numel()
            mine += parameter.to_local().numel()
        print(f"{file} {total} {mine}")


if __name__ == "__main__":
    main()
