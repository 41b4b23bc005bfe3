"""Facts about CUDA for tests: `python -m tests.fake_cuda tests.fake_cuda.cases RESULTS.json [NAMES OF STEPS]`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fake_cuda.operators import OperatorLog
from tests.fake_cuda.step import DEVICE, config_of, logged_step
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models.attention import within_documents
from torchtitan_lite.models.generation import KeysValues
from torchtitan_lite.models.llama import Attention

VOCABULARY = 512
_BASE = {
    **{"model.family": "llama", "model.dim": 256, "model.n_heads": 8, "model.n_kv_heads": 2, "model.n_layers": 2},
    **{"model.max_seq_len": 256, "train.seq_len": 256, "train.micro_batch_size": 1, "train.global_batch_size": 8},
    **{"tokenizer.vocab_size": VOCABULARY, "run.device": "cuda", "fsdp.param_dtype": "bfloat16"},
    **{"optim.name": "adamw"},
}
_FULL, _SELECTIVE = {"activation_checkpointing.mode": "full"}, {"activation_checkpointing.mode": "selective"}
_MASK = {"data.document_mask": True, "data.packing": "best_fit"}
_TWO = {"train.global_batch_size": 16}  # micro-batches
_GATHERED = {"fsdp.reshard_after_forward": False, "fsdp.reshard_after_backward": False}
_HALF = {"fsdp.param_dtype": "float16"}
_PREFETCHING = {"fsdp.explicit_prefetching": True}
_TIED = {"model.tie_embeddings": True}
_LAST = {"fsdp.grad_sync": "last"}
_GPT: dict[str, Any] = {"model.family": "gpt", "model.n_kv_heads": None}

# Options of a step, by name. Together the first ones hold every option.
TABLE: dict[str, dict[str, Any]] = {
    "HSDP, full checkpointing, explicit prefetching": {"fsdp.dp_replicate": 2, **_FULL, **_PREFETCHING},
    "document mask, selective checkpointing": _MASK | _SELECTIVE,
    "world of one, float16, tied": {"train.global_batch_size": 1, **_HALF, **_TIED},
    "accumulation, kept gathered, gradients synchronised once": _TWO | _GATHERED | _LAST,
}
MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"fsdp.param_dtype": "float32"},
    "float16": _HALF,
    "HSDP": {"fsdp.dp_replicate": 2},
    "full checkpointing": _FULL,
    "selective checkpointing": _SELECTIVE,
    "tied": _TIED,
    "RMS scaling, HSDP": {"optim.rms_scaling": True, "fsdp.dp_replicate": 2},
    "explicit prefetching": _PREFETCHING,
    "document mask": _MASK,
    "document mask, full checkpointing": _MASK | _FULL,
    "world of one": {"train.global_batch_size": 1},
    "accumulation": _TWO,
    "accumulation, kept gathered": _TWO | _GATHERED,
    "accumulation, gradients synchronised once": _TWO | _LAST,
    "gpt, dropout": {**_GPT, "model.dropout": 0.1},
    "gpt, document mask": {**_GPT, **_MASK},
    "logits of all tokens": {"speed.chunked_loss": False},
}


def step_facts(name: str) -> dict[str, Any]:
    """What the tests ask about a step."""
    world_size = 1 if "world of one" in name else 8
    values = {key: value for key, value in (_BASE | (TABLE | MORE)[name]).items() if value is not None}
    log = logged_step(config_of(values, world_size), world_size, VOCABULARY)
    return {
        "operators": len(log.operators),
        "waits": [(o.name, o.where, o.waits) for o in log.waits],
        "attention": [o.name for o in log.operators if "attention" in o.name],
    }


def attention_facts() -> dict[str, Any]:
    """The kernels of Llama's attention, and the bytes of heads that it copies, by dtype, tokens and heads."""
    found = {}
    for dtype, length, kv_heads, cached in [
        *((torch.bfloat16, 256, 2, False), (torch.float16, 256, 2, False), (torch.float32, 256, 2, False)),
        *((torch.bfloat16, 256, 8, False), (torch.bfloat16, 100, 2, False), (torch.bfloat16, 1, 2, True)),
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
    """By sequence length: bytes that making a document mask moves, and those of the largest tensor."""
    found = {}
    for length in (8192, 32768):
        with FakeTensorMode(), OperatorLog() as log:
            within_documents(torch.empty(1, length, dtype=torch.int64, device=DEVICE), dense=False)
        found[str(length)] = log.bytes(), max(o.written for o in log.operators), len(log.waits)
    return found


def main(argv: Sequence[str]) -> int:
    found = {"attention": attention_facts(), "mask": mask_facts()}
    found |= {"steps": {name: step_facts(name) for name in argv[1:] or TABLE}}
    Path(argv[0]).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit("python -m tests.fake_cuda tests.fake_cuda.cases RESULTS.json")
