"""Changes to the model that are no keys: `python -m benchmarks.learning_train PROGRAM VARIANTS OPTIONS...`.

PROGRAM is train or evaluate, and gets the options. VARIANTS are names below, separated by commas, or "". A run is
trained and scored with the same. For benchmarks/learning.py.
"""

import math
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_lite.models import llama
from torchtitan_lite.models.transformer import Head
from torchtitan_lite.tools.evaluation import tables
from torchtitan_lite.tools.evaluation.documents import Scores

ROOT = Path(__file__).parent.parent


def relu2() -> None:
    """ReLU^2 in place of SwiGLU's SiLU times gate (So et al., 2021): two matrices, 1.5 times as wide."""

    class FeedForward(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            wide = 3 * config.dim_of_ffn // 2
            self.w1 = torch.nn.Linear(config.dim, wide, bias=False)
            self.w2 = torch.nn.Linear(wide, config.dim, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.w2(F.relu(self.w1(x)).square())

    llama.FeedForward = FeedForward  # type: ignore[misc, assignment]


def softcap() -> None:
    """Logits through 15 tanh(x / 15) (modded-nanogpt's; Gemma 2 has 30)."""

    def capped(self: Any, x: Tensor, targets: Tensor | None = None, *, per_sequence: bool = False) -> Tensor:
        if targets is not None:
            raise NotImplementedError("a chunked loss of other logits: use speed.chunked_loss = false")
        return 15 * torch.tanh(self.linear(x, self.weight) / 15)

    Head.forward = capped  # type: ignore[method-assign]


def value_embeddings() -> None:
    """The last block's values get an embedding of their token, gated for each head (ResFormer; nanochat's form)."""
    build, inputs = llama.Llama.__init__, llama.Llama.inputs
    attention, forward = llama.Attention.__init__, llama.Attention.forward
    found: dict[str, Tensor] = {}

    def with_table(self: Any, config: Any, vocab_size: int) -> None:
        build(self, config, vocab_size)
        self.value_embeddings = torch.nn.Embedding(vocab_size, config.kv_heads * config.dim_of_heads)

    def looked_up(self: Any, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        found["values"] = self.value_embeddings(tokens)
        return inputs(self, tokens, positions)

    def with_gate(self: Any, config: Any, layer: int = 0) -> None:
        attention(self, config, layer)
        self.gated = layer == config.n_layers - 1
        if self.gated:
            self.gate = torch.nn.Linear(config.dim, config.kv_heads, bias=False)
            self.wv.register_forward_hook(lambda _, args, v: v + self.of_tokens(args[0]))

    def of_tokens(self: Any, x: Tensor) -> Tensor:
        gates = 3 * torch.sigmoid(self.gate(x)).unsqueeze(-1)
        return (gates * found["values"].unflatten(-1, (-1, self.head_dim))).flatten(-2)

    llama.Llama.__init__, llama.Llama.inputs = with_table, looked_up  # type: ignore[method-assign]
    llama.Attention.__init__, llama.Attention.forward = with_gate, forward  # type: ignore[method-assign]
    llama.Attention.of_tokens = of_tokens  # type: ignore[attr-defined]


def documents() -> None:
    """Add each document's bits and bytes to the figures of `evaluate`."""
    given = tables.figures

    def figures(scores: Scores) -> dict[str, Any]:
        bits = (scores.nats / math.log(2)).round(3)
        return {**given(scores), "bits": bits.tolist(), "bytes": scores.n_bytes.round(3).tolist()}

    tables.figures = figures


if __name__ == "__main__":
    program, variants, *options = sys.argv[1:]
    for name in filter(None, variants.split(",")):
        globals()[name]()
    documents()
    sys.path.insert(0, str(ROOT))
    file = {"train": ROOT / "train.py", "evaluate": ROOT / "torchtitan_lite" / "evaluate.py"}[program]
    sys.argv = [str(file), *options]
    runpy.run_path(sys.argv[0], run_name="__main__")
