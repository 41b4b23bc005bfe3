"""What a checkpoint has to have in common with the run that resumes it."""

from collections.abc import Mapping
from typing import Any

import torch

from torchtitan_lite.config import Config
from torchtitan_lite.data.prepare import Meta
from torchtitan_lite.distributed import World
from torchtitan_lite.storage import TrainState


def fresh_state(config: Config, meta: Meta, world: World) -> TrainState:
    """The state before the first step."""
    return TrainState(identity=identity(config, meta), setting=setting(config, world))


def identity(config: Config, meta: Meta) -> dict[str, Any]:
    """What can't change while a run goes on, by config key: a checkpoint that differs is refused."""
    model = {f"model.{key}": value for key, value in config.model if key != "size"}
    data = {"tokenizer": meta.tokenizer_sha256, "data": meta.tokens_sha256}
    return model | data | {"train.seq_len": config.train.seq_len, "run.seed": config.run.seed}


def setting(config: Config, world: World) -> dict[str, Any]:
    """What has to be the same for a bitwise resume: all of it changes the order in which numbers are summed."""
    on_gpu = world.device.type == "cuda"
    return {
        "world_size": world.world_size,
        "dp_replicate": config.fsdp.dp_replicate,
        "micro_batch_size": config.train.micro_batch_size,
        "param_dtype": config.fsdp.param_dtype,
        "reduce_dtype": config.fsdp.reduce_dtype,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else "cpu",
        "deterministic": config.run.deterministic or not on_gpu,
        "threads": world.threads,
        "torch": torch.__version__,
    }


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The values that changed, as "threads 1 -> 2, ..."; empty if the resume is bit for bit."""
    return ", ".join(f"{key} {saved.get(key)} -> {value}" for key, value in here.items() if saved.get(key) != value)
