"""Facts about CUDA for tests: `python -m tests.fake_cuda tests.fake_cuda.cases RESULTS.json`."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fake_cuda import stand_ins
from tests.fake_cuda.operators import OperatorLog
from tests.fake_cuda.step import DEVICE, config_of, logged_step
from torchtitan_lite.checkpointing.save import HostCopies
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models.attention import KeysValues
from torchtitan_lite.models.llama import Attention
from torchtitan_lite.models.masks import within_documents

VOCABULARY = 512
_BASE = {
    **{"model.family": "llama", "model.dim": 256, "model.n_heads": 8, "model.n_kv_heads": 2, "model.n_layers": 2},
    **{"model.max_seq_len": 256, "train.seq_len": 256, "train.micro_batch_size": 1, "train.global_batch_size": 8},
    **{"tokenizer.vocab_size": VOCABULARY, "run.device": "cuda", "fsdp.param_dtype": "bfloat16"},
    **{"optim.name": "adamw", "log.every": 1},
}
# Options of a step, by name. Together they hold every option.
TABLE: dict[str, dict[str, Any]] = {
    "hybrid, HSDP, full checkpointing, explicit prefetching": {
        **{"model.family": "olmo_hybrid", "model.layer_pattern": "delta,full", "train.seq_len": 128},
        **{"fsdp.dp_replicate": 2, "fsdp.explicit_prefetching": True},
        "activation_checkpointing.mode": "full",
    },
    "document mask, selective checkpointing, HSDP, muon": {
        **{"optim.name": "muon", "fsdp.dp_replicate": 2, "log.norms": True},
        **{"data.document_mask": True, "data.packing": "best_fit", "activation_checkpointing.mode": "selective"},
    },
    "world of one, float16, tied, logits of all tokens, muon, window": {
        **{
            "optim.name": "muon",
            "train.global_batch_size": 1,
            "fsdp.param_dtype": "float16",
            "model.tie_embeddings": True,
            "model.window": 64,
            "model.layer_pattern": "window,full",
        },
        "speed.chunked_loss": False,
    },
    "experts, their bias, selective checkpointing": {
        **{"model.family": "qwen3_moe", "model.n_experts": 4, "model.router_bias": True, "optim.name": "muon"},
        "activation_checkpointing.mode": "selective",
    },
    "gpt in float32, dropout, accumulation, kept gathered, gradients synchronised once": {
        **{"model.family": "gpt", "model.n_kv_heads": None, "model.dropout": 0.1, "fsdp.param_dtype": "float32"},
        **{"train.global_batch_size": 16, "fsdp.grad_sync": "last"},
        **{"fsdp.reshard_after_forward": False, "fsdp.reshard_after_backward": False},
    },
}


def step_facts(name: str) -> dict[str, Any]:
    """What the tests ask about a step."""
    world_size = 1 if "world of one" in name else 8
    values = {key: value for key, value in (_BASE | TABLE[name]).items() if value is not None}
    log = logged_step(config_of(values, world_size), world_size, VOCABULARY)
    return {
        "operators": len(log.operators),
        "spans": stand_ins._elapsed[0],
        "waits": [(o.name, o.where, o.waits) for o in log.waits],
        "attention": [o.name for o in log.operators if "attention" in o.name],
        "muon": [o.name for o in log.operators if "bmm" in o.name and o.where.startswith("torchtitan_lite/optim/")],
    }


def attention_facts() -> dict[str, Any]:
    """The kernels of Llama's attention, and the bytes of heads that it copies, by dtype, tokens and heads."""
    found = {}
    for dtype, length, kv_heads, cached in [
        *((torch.bfloat16, 256, 2, False), (torch.float16, 256, 2, False), (torch.float32, 256, 2, False)),
        *((torch.bfloat16, 256, 8, False), (torch.bfloat16, 100, 2, False)),
        *((torch.bfloat16, 1, 2, True), (torch.bfloat16, 2, 2, True)),
    ]:
        config = ModelConfig.model_validate({"dim": 512, "n_heads": 8, "n_kv_heads": kv_heads, "family": "llama"})
        with FakeTensorMode(), torch.device(DEVICE):
            torch.set_default_dtype(dtype)
            module, cache = Attention(config), KeysValues()
            cache.extend(*(torch.empty(2, 255, kv_heads, 64) for _ in range(2)))
            x, tables = torch.empty(2, length, 512), torch.empty(2, length, 64, dtype=torch.float32)
            with OperatorLog() as log:
                module(x, *tables, cache if cached else None)
            torch.set_default_dtype(torch.float32)
        kernels = [o.name for o in log.operators if "attention" in o.name or "bmm" in o.name]
        copied = sum(o.written for o in log.operators if o.name in ("aten.clone.default", "aten.index_select.default"))
        found[f"{str(dtype).removeprefix('torch.')}, {length}, {kv_heads}{', cached' * cached}"] = kernels, copied
    return found


def mask_facts() -> dict[str, Any]:
    """By sequence length: the bytes of the largest tensor while a document mask is made, and the waits."""
    found = {}
    for length in (8192, 32768):
        with FakeTensorMode(), OperatorLog() as log:
            within_documents(torch.empty(1, length, dtype=torch.int64, device=DEVICE), dense=False)
        found[str(length)] = max(o.written for o in log.operators), len(log.waits)
    return found


def save_facts() -> dict[str, Any]:
    """The page-locked bytes that copies of a shard ask for, and whether they hold the same."""
    chance = torch.Generator().manual_seed(1)
    shard = {f"{rows}": torch.randn(rows, 1024, generator=chance) for rows in (1, 257, 520, 1030, 2052)}  # beyond 2**n
    shard |= {"step": torch.tensor(3.0), "flags": torch.ones(5, dtype=torch.bool)}
    copies = HostCopies(torch.device(DEVICE))
    found = copies.of(shard)
    asked = [*stand_ins.REGISTERED.values()]
    copies.of({"1": shard["1"]})  # another shape: the first block goes
    left = [*stand_ins.REGISTERED.values()]
    with (
        mock.patch.object(stand_ins.RUNTIME, "cudaHostRegister", return_value=2),
        mock.patch.object(torch, "zeros", side_effect=RuntimeError("CUDA error: out of memory")) as kernel,
        contextlib.suppress(torch.cuda.CudaError),
    ):
        copies.of(shard)
        raise AssertionError("a block that is not page-locked")
    return {
        "bytes": sum(tensor.nbytes for tensor in shard.values()),
        "asked": sum(asked),
        "left": left,
        "kernels after an error": kernel.call_count,
        "same": all(torch.equal(found[name], shard[name]) for name in shard),
    }


def main(argv: Sequence[str]) -> int:
    steps = {name: step_facts(name) for name in TABLE}
    facts = {"attention": attention_facts(), "mask": mask_facts(), "save": save_facts(), "steps": steps}
    Path(argv[0]).write_text(json.dumps(facts))
    return 0
