"""The table of [fsdp] and related keys that test_knobs.py compares with an unsharded reference: at most 70 rows,
of which 8 are of Muon, the only optimizer that communicates.

The fast paths of [speed] are on, as by default, with blocks and chunks so small (knob_worker.py) that a sequence has
several; the plain model has none of them.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.config import load
from torchtitan_lite.config.schema import Config
from torchtitan_lite.data.order import Indices
from torchtitan_lite.data.samples import Rows, Samples

STEPS = 2
VOCABULARY = 517
# Rows of 50, 36, 12 and 517 divide by neither 4 nor, partly, 2; a batch of 6 sequences is not full on 4 ranks.
LLAMA = {
    "model.family": "llama",
    **{"model.dim": 36, "model.n_heads": 6, "model.n_kv_heads": 2, "model.hidden_dim": 50, "model.n_layers": 3},
    **{"model.max_seq_len": 16, "train.seq_len": 16, "train.steps": 20},
    **{"optim.warmup_steps": 2, "optim.lr": 0.002, "optim.name": "adamw"},
    **{"train.micro_batch_size": 1, "train.global_batch_size": 6, "run.threads": 1},
    **{"log.every": 1, "log.norms": True},
}
GPT = {k: v for k, v in LLAMA.items() if k not in ("model.n_kv_heads", "model.hidden_dim")} | {
    "model.family": "gpt",
    "model.tie_embeddings": False,
}
T5 = {key: value for key, value in LLAMA.items() if key != "model.n_kv_heads"} | {
    **{"model.family": "t5", "model.n_layers": 2, "model.n_decoder_layers": 3, "model.head_dim": 5},
    "data.objective": "span_corruption",
}

# The largest relative difference of a loss and of a gradient norm to the reference in float32, over STEPS steps.
# float32 sums in another order, 2^-24 a time; measured 2e-7 and 5e-7. bfloat16 keeps 8 bits (2^-9 is 2e-3), float16 11
# (2^-12 is 2e-4): a loss averages over many roundings (measured 6e-5 and 9e-6), a norm is about one (3e-3 and 2e-4).
# T5 starts with logits of size 1, 10 times those of the others, and their rounding errors (measured 7e-4 and 3e-3).
TOLERANCE = {
    **{"float32": (2e-6, 5e-6), "bfloat16": (5e-4, 1e-2), "float16": (1e-4, 1e-3)},
    "bfloat16, t5": (2e-3, 1e-2),
}


@dataclass(frozen=True)
class Case:
    """One row: what is set, on how many ranks, and what is expected of it."""

    ranks: int
    set: dict[str, Any] = field(default_factory=dict)
    base: str = "llama"
    dtype: str = "float32"  # the coarsest in use: decides the tolerance
    same_as: str = ""  # another row whose losses and norms have to be the same bit for bit
    reference: bool = True  # with dropout there is none: masks depend on the ranks
    muon_as_on_gpu: bool = False  # its iteration and exchanges are in bfloat16

    def config(self, device: str = "cpu") -> Config:
        """The config, as given on the command line."""
        values = (
            {"llama": LLAMA, "gpt": GPT, "t5": T5}[self.base] | {"model.size": "1M", "run.device": device} | self.set
        )
        n_gpus = int(device == "cuda")
        return load.load(None, values, world_size=self.ranks, n_gpus=n_gpus, local_world_size=2 - n_gpus).config


BF16 = {"fsdp.param_dtype": "bfloat16"}
FP16 = {"fsdp.param_dtype": "float16"}
HSDP = {"fsdp.dp_replicate": 2}
FIRST_LAYER_FP32 = {"fsdp.precision_overrides": [{"match": "layers.0.*", "param_dtype": "float32"}]}
PLAIN = {f"speed.{key}": False for key in ("chunked_loss", "block_attention", "fused_functions", "shared_memory")}
HANDED_ON = {"fsdp.output_dtype": "float16"}
EXPLICIT = {"fsdp.explicit_prefetching": True}
SPLIT = {"fsdp.shard_columns": ["tok_embeddings.*", "*.w[kq].weight"]}
WINDOWS = {"model.window": 5, "model.layer_pattern": "window,nope,full"}  # in rows of each kind of attention
GEMMA3 = {"model.family": "gemma3", "model.window": 5, "model.layer_pattern": "window,window,full"}
OLMO3 = GEMMA3 | {"model.family": "olmo3"}
HYBRID = {"model.family": "olmo_hybrid", "model.layer_pattern": "delta,full"}
EXPERTS = {
    **{"model.family": "qwen3_moe", "model.n_experts": 5, "model.experts_per_token": 2},
    **{"train.router_aux_loss": 0.1, "train.router_z_loss": 0.01},
}
FEW_EXPERTS = EXPERTS | {"model.n_experts": 3, "model.hidden_dim": 48}  # split within each expert, on 4 ranks
REDUCES = {"fsdp.separate_reduce_scatter_group": True, "fsdp.reduce_scatter_buffers": 2, "speed.shared_memory": False}
MUON = {"optim.name": "muon", "optim.muon_embedding_lr_factor": 1.0}

CASES = {
    # how much is gathered, and when
    "llama": Case(2),
    "norms of gradients only": Case(2, {"log.norms": False}, same_as="llama"),
    "gpt": Case(2, base="gpt"),
    "reshard true": Case(2, {"fsdp.reshard_after_forward": True}, same_as="llama"),
    "reshard false": Case(2, {"fsdp.reshard_after_forward": False}, same_as="llama"),
    "SHARD_GRAD_OP": Case(2, {"fsdp.sharding_strategy": "SHARD_GRAD_OP"}, same_as="llama"),
    "NO_SHARD": Case(2, OLMO3 | {"fsdp.sharding_strategy": "NO_SHARD"}),
    "2 blocks in a group": Case(2, {"fsdp.blocks_per_group": 2}, same_as="llama"),
    "columns": Case(2, GEMMA3 | {"fsdp.shard_columns": ["*"], "fsdp.reshard_after_forward": True}),
    "columns, tied, prefetch 2": Case(2, SPLIT | EXPLICIT | {"model.tie_embeddings": True}, base="gpt"),
    "reduce-scatter apart, 2 buffers": Case(2, REDUCES, same_as="llama"),
    "prefetch 1": Case(2, EXPLICIT | {"fsdp.forward_prefetch": 1, "fsdp.backward_prefetch": 1}, same_as="llama"),
    "prefetch 3, kept": Case(
        2,
        EXPLICIT | {"fsdp.forward_prefetch": 3, "fsdp.backward_prefetch": 3, "fsdp.reshard_after_backward": False},
        same_as="llama",
    ),
    # precision
    "bf16": Case(2, BF16, dtype="bfloat16"),
    "bf16 throughout": Case(2, BF16 | {"fsdp.reduce_dtype": "bfloat16"}, dtype="bfloat16"),
    "reduce in bf16": Case(2, {"fsdp.reduce_dtype": "bfloat16"}, dtype="bfloat16"),
    "fp16": Case(2, FP16 | {"fsdp.reduce_dtype": "float16"}, dtype="float16"),
    "fp16, gpt": Case(2, FP16, base="gpt", dtype="float16"),
    "first layer fp32": Case(2, BF16 | FIRST_LAYER_FP32, dtype="bfloat16"),
    "first layer fp32, tied": Case(
        2, BF16 | FIRST_LAYER_FP32 | {"model.tie_embeddings": True}, base="gpt", dtype="bfloat16"
    ),
    "fp32 between groups": Case(2, BF16 | {"fsdp.output_dtype": "float32"}, dtype="bfloat16", same_as="bf16"),
    "all inputs cast": Case(2, BF16 | {"fsdp.cast_forward_inputs": True}, dtype="bfloat16"),
    # accumulation
    "sync last": Case(2, {"fsdp.grad_sync": "last"} | HYBRID),
    "sync last, kept, bf16": Case(
        2, BF16 | {"fsdp.grad_sync": "last", "fsdp.reshard_after_backward": False}, dtype="bfloat16"
    ),
    # blocks
    "checkpointing full": Case(2, {"activation_checkpointing.mode": "full"}, same_as="llama"),
    "checkpointing full, value embeddings": Case(
        2, {"model.family": "resformer", "activation_checkpointing.mode": "full"}
    ),
    "checkpointing selective": Case(
        2, {"activation_checkpointing.mode": "selective", "activation_checkpointing.every": 2}, same_as="llama"
    ),
    "dropout": Case(2, {"model.dropout": 0.2}, base="gpt", reference=False),
    "dropout, checkpointing selective": Case(
        2,
        {"model.dropout": 0.2, "activation_checkpointing.mode": "selective"},
        base="gpt",
        reference=False,
        same_as="dropout",
    ),
    "compile": Case(2, {"compile.enabled": True} | WINDOWS),
    "compile, checkpointing full": Case(
        2, {"compile.enabled": True, "compile.backend": "aot_eager", "activation_checkpointing.mode": "full"} | EXPERTS
    ),
    "tied": Case(2, {"model.tie_embeddings": True} | EXPERTS),
    # fast paths
    "plain": Case(2, PLAIN | WINDOWS),
    "plain, bf16": Case(2, BF16 | PLAIN, dtype="bfloat16"),
    "plain, gpt, fp16, handed on in fp16": Case(2, FP16 | PLAIN | HANDED_ON, base="gpt", dtype="float16"),
    "gpt, fp16, handed on in fp16": Case(2, FP16 | HANDED_ON, base="gpt", dtype="float16"),
    "bf16, handed on in bf16": Case(2, BF16 | {"fsdp.output_dtype": "bfloat16"}, dtype="bfloat16", same_as="bf16"),
    "frozen": Case(2, {"optim.freeze": ["tok_embeddings.*", "layers.0.*", "layers.2.attention.wq.weight"]}),
    # 4 ranks
    "4 ranks": Case(4),
    "3 ranks": Case(3, {"model.tie_embeddings": True}, base="gpt"),
    "reshard to 2": Case(4, {"fsdp.reshard_after_forward": 2}, same_as="4 ranks"),
    "reshard to 2, prefetch 2, tied": Case(
        4, EXPLICIT | {"fsdp.reshard_after_forward": 2, "model.tie_embeddings": True}, base="gpt"
    ),
    "HSDP": Case(4, HSDP),
    "HSDP, sync last": Case(4, HSDP | {"fsdp.grad_sync": "last"}),
    "HSDP, all-reduce last": Case(4, HSDP | {"fsdp.grad_sync": "all_reduce_last"}),
    "HSDP, all-reduce last, bf16 throughout": Case(
        4, HSDP | BF16 | {"fsdp.reduce_dtype": "bfloat16", "fsdp.grad_sync": "all_reduce_last"}, dtype="bfloat16"
    ),
    "HSDP, columns, bf16, all-reduce last": Case(
        4, HSDP | BF16 | SPLIT | {"fsdp.grad_sync": "all_reduce_last"}, dtype="bfloat16"
    ),
    "HSDP, reduce-scatter apart, 2 buffers": Case(4, HSDP | REDUCES),
    "HYBRID_SHARD": Case(4, {"fsdp.sharding_strategy": "HYBRID_SHARD"}, same_as="HSDP"),
    "_HYBRID_SHARD_ZERO2": Case(4, {"fsdp.sharding_strategy": "_HYBRID_SHARD_ZERO2"}, same_as="HSDP"),
    "4 copies": Case(4, {"fsdp.dp_shard": 1}),
    "HSDP, fp16": Case(4, HSDP | FP16 | {"grad_scaler.init_scale": 1024.0}, dtype="float16"),
    "frozen head, sync last": Case(4, {"fsdp.grad_sync": "last", "optim.freeze": ["output.*"]}),
    "all that people use at once": Case(
        4,
        BF16 | HSDP | EXPLICIT
        | {"activation_checkpointing.mode": "selective", "compile.enabled": True, "compile.backend": "aot_eager"},
        dtype="bfloat16",
    ),
    # Muon, which exchanges matrices in each step
    "muon": Case(2, MUON),
    "muon, norms of gradients only": Case(2, MUON | {"log.norms": False}, same_as="muon"),
    "muon, reshard true, 2 blocks in a group": Case(
        2, MUON | {"fsdp.reshard_after_forward": True, "fsdp.blocks_per_group": 2}, same_as="muon"
    ),
    "muon, columns": Case(4, MUON | FEW_EXPERTS | {"fsdp.shard_columns": ["*.attention.*"]}),
    "muon, bf16": Case(2, MUON | BF16, dtype="bfloat16", muon_as_on_gpu=True),
    "muon, HSDP, all-reduce last": Case(4, MUON | HSDP | EXPERTS | {"fsdp.grad_sync": "all_reduce_last"}),
    "muon, sync last, tied, frozen": Case(
        4,
        MUON | {"fsdp.grad_sync": "last", "model.tie_embeddings": True}
        | {"optim.freeze": ["layers.0.*", "layers.2.attention.wq.weight"]},
    ),
    "muon, t5": Case(2, MUON, base="t5"),
    # an encoder-decoder
    "t5": Case(2, base="t5"),
    "t5, checkpointing full, prefetch 3": Case(
        2,
        EXPLICIT | {"fsdp.forward_prefetch": 3, "fsdp.backward_prefetch": 3, "activation_checkpointing.mode": "full"},
        base="t5",
        same_as="t5",
    ),
    "t5, bf16, compile": Case(
        2, BF16 | {"compile.enabled": True, "compile.backend": "aot_eager"}, base="t5", dtype="bfloat16, t5"
    ),
    "t5, first layer fp32": Case(2, BF16 | FIRST_LAYER_FP32, base="t5", dtype="bfloat16, t5"),
    # not the same bits: gradients of the bias tables, which all blocks share, are added in another order
    "t5, 2 blocks in a group": Case(2, EXPLICIT | {"fsdp.blocks_per_group": 2}, base="t5"),
    "t5, plain": Case(2, PLAIN, base="t5"),
    "t5, v1.0, HSDP, sync last": Case(
        4,
        HSDP | {"fsdp.grad_sync": "last"}
        | {"model.gated": False, "model.tie_embeddings": True, "model.scale_output": True},
        base="t5",
    ),
    "t5, dropout, checkpointing selective": Case(
        2, {"model.dropout": 0.2, "activation_checkpointing.mode": "selective"}, base="t5", reference=False
    ),
}  # fmt: skip


# combinations of what other rows have: `make test-all` runs them
EXTENDED = {
    *("reshard true", "reshard false", "prefetch 1", "prefetch 3, kept", "reshard to 2, prefetch 2, tied", "4 copies"),
    *("bf16 throughout", "bf16, handed on in bf16", "fp32 between groups", "all inputs cast", "reduce in bf16"),
    *("fp16, gpt", "gpt, fp16, handed on in fp16", "first layer fp32", "first layer fp32, tied", "gpt", "tied"),
    *("sync last, kept, bf16", "frozen", "frozen head, sync last", "dropout", "dropout, checkpointing selective"),
    *(
        "checkpointing selective",
        "compile, checkpointing full",
        "compile",
    ),  # inductor: 25 calls of g++ on each rank
    *("plain", "plain, bf16", "plain, gpt, fp16, handed on in fp16", "all that people use at once"),
    *("HSDP, sync last", "HSDP, all-reduce last", "HSDP, all-reduce last, bf16 throughout", "HSDP, fp16"),
    *("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "t5, plain", "t5, first layer fp32", "t5, bf16, compile"),
    *("t5, dropout, checkpointing selective", "muon, reshard true, 2 blocks in a group", "muon, bf16", "muon, t5"),
    *("muon, sync last, tied, frozen", "columns, tied, prefetch 2", "HSDP, reduce-scatter apart, 2 buffers"),
    *("SHARD_GRAD_OP", "checkpointing full", "muon, norms of gradients only", "t5, 2 blocks in a group"),
}

# On one GPU: the rows that need no second rank, and those that need a GPU. FlexAttention, which computes windows there,
# needs heads of 16 or wider.
OFFLOAD = {"fsdp.cpu_offload": True}
ON_CUDA = {
    name: replace(case, ranks=1, set=case.set | ({"model.dim": 96} if "model.window" in case.set else {}))
    for name, case in CASES.items()
    if case.ranks == 2 and name != "NO_SHARD"
}
ON_CUDA |= {
    "host offload": Case(1, OFFLOAD),
    "host offload, not pinned": Case(1, OFFLOAD | {"fsdp.pin_memory": False}, same_as="host offload"),
    "host offload, fp16": Case(1, OFFLOAD | FP16, dtype="float16"),
}


class FixedSamples(Samples):
    """Random sequences that repeat, without a file."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = self.target_len = seq_len
        self.n_samples = 12
        generator = torch.Generator().manual_seed(5)
        self._rows = torch.randint(VOCABULARY, (self.n_samples, seq_len + 1), generator=generator)

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index % self.n_samples]

    def draw(self, run_samples: Indices, seed: int | None) -> Rows:
        rows = Rows.empty(len(run_samples), self.seq_len)
        both = self._rows.numpy()[run_samples % self.n_samples]
        rows.tokens[:], rows.targets[:] = both[:, :-1], both[:, 1:]
        return rows
