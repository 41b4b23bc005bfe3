"""Llama with value embeddings: every other block, and the last, adds an embedding of the token to its values.

From ResFormer (Zhou et al., 2024; arXiv 2410.17897), gated as in nanochat. With the block's input x and the token t,

    v = Wv x + 3 sigmoid(G x) * U[t]

G has one row, and so one gate, per key-value head. A table U costs memory, but only one lookup per token. Hugging Face
has no model with such tables, so there is no export.

Shapes as in llama.py.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models import llama
from torchtitan_lite.models.attention import KeysValues
from torchtitan_lite.models.loss import LossOptions


def has_table(layer: int, n_layers: int) -> bool:
    """Return whether a block has value embeddings: the last one, and every other one before it."""
    return (n_layers - 1 - layer) % 2 == 0


class TransformerBlock(llama.TransformerBlock):
    """A Llama block that adds gated value embeddings."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.table = layer // 2 if has_table(layer, config.n_layers) else None
        if self.table is not None:
            self.gate = nn.Linear(config.dim, config.kv_heads, bias=False)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        added: Tensor,
        cache: KeysValues | None = None,
        mask: Any = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); `added` has all tables' embeddings, (B, T, tables, K, E)"""
        h, values = self.attention_norm(x), None
        if self.table is not None:
            values = (3 * torch.sigmoid(self.gate(h)).unsqueeze(-1) * added[:, :, self.table]).type_as(h)
        x = x + self.attention(h, cos, sin, cache=cache, mask=mask, added=values)
        return x + self.feed_forward(self.ffn_norm(x))


class ResFormer(llama.Llama):
    """Llama with value embeddings for every block that has a table."""

    block = TransformerBlock

    def __init__(self, config: ModelConfig, vocab_size: int, losses: LossOptions) -> None:
        super().__init__(config, vocab_size, losses)
        self.n_tables = sum(has_table(layer, config.n_layers) for layer in range(config.n_layers))
        self.value_embeddings = nn.Embedding(vocab_size, self.n_tables * config.kv_heads * config.dim_of_heads)

    def inputs(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return Llama's inputs, and value embeddings (B, T, tables, K, E)."""
        x, shared = super().inputs(tokens, positions)
        added = self.value_embeddings(tokens).unflatten(-1, (self.n_tables, self.config.kv_heads, -1))
        return x, shared | {"added": added}
