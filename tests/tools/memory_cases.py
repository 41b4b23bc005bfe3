"""Configs whose memory is planned in one process and measured in another."""

from typing import Any

from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config

VOCABULARY = 2048
_LLAMA = {
    **{"model.size": "1M", "train.seq_len": 256, "train.micro_batch_size": 4, "train.global_batch_size": 8},
    **{"optim.name": "adamw"},
}
_BF16 = {"fsdp.param_dtype": "bfloat16"}

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, bfloat16, selective": _BF16 | {"activation_checkpointing.mode": "selective"},
    "llama, selective": {"activation_checkpointing.mode": "selective"},
    "llama, full": {"activation_checkpointing.mode": "full"},
    "llama, full, every other of 6": {
        **{"activation_checkpointing.mode": "full", "activation_checkpointing.every": 2, "model.n_layers": 6}
    },
    "llama, wide, accumulating": {
        **_BF16,
        **{"model.dim": 384, "train.seq_len": 256, "train.micro_batch_size": 2, "fsdp.grad_sync": "last"},
    },
    "gpt": {"model.family": "gpt", "model.size": "3M", "train.seq_len": 128},
    "gpt, dropout, long": {"model.family": "gpt", "model.dropout": 0.1, "train.seq_len": 512, "optim.name": "sgd"},
    "tied, bfloat16, prefetching": _BF16 | {"model.tie_embeddings": True, "fsdp.explicit_prefetching": True},
}
EXTENDED = "llama, bfloat16, selective", "llama, selective", "llama, full, every other of 6"
SLOW = "llama", "llama, full", "gpt", "llama, wide, accumulating", "gpt, dropout, long"

# on a GPU: so much that the workspace of cuBLAS does not matter
LARGE = {"train.micro_batch_size": 64, "train.global_batch_size": 128}


def config_of(name: str, world_size: int, **more: Any) -> Config:
    values = _LLAMA | CASES[name] | more
    if name.startswith("gpt"):
        values |= {"model.max_seq_len": 512}
    overrides = {key: load.ConfigValue(value, "test") for key, value in values.items()}
    return load.load(None, overrides, world_size=world_size, n_gpus=8).config
