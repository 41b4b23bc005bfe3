"""GPT-2's architecture, the tutorial's Transformer made causal: learned positions, LayerNorm, GELU, dropout.

Shapes: B sequences, T tokens, D dim, H heads, V vocabulary.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models.attention import KeysValues, attend
from torchtitan_lite.models.loss import LossOptions
from torchtitan_lite.models.transformer import Transformer


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attend = attend  # cpu/ may replace it
        self.n_heads = config.n_heads
        self.dropout = config.dropout
        self.wq = nn.Linear(config.dim, config.dim)
        self.wk = nn.Linear(config.dim, config.dim)
        self.wv = nn.Linear(config.dim, config.dim)
        self.wo = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, cache: KeysValues | None = None, mask: Any = None) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        q, k, v = (w(x).unflatten(-1, (self.n_heads, -1)) for w in (self.wq, self.wk, self.wv))  # (B, T, H, D / H)
        if cache is not None:
            k, v = cache.extend(k, v)
        dropout = self.dropout if self.training else 0.0
        return self.wo(self.attend(q, k, v, mask=mask, dropout=dropout).flatten(2))


class FeedForward(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.dim_of_ffn)
        self.w2 = nn.Linear(config.dim_of_ffn, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: KeysValues | None = None, mask: Any = None) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        x = x + self.dropout(self.attention(self.attention_norm(x), cache=cache, mask=mask))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class GPT(Transformer):
    """Token embeddings plus learned positions, then blocks."""

    def __init__(self, config: ModelConfig, vocab_size: int, losses: LossOptions) -> None:
        blocks: list[nn.Module] = [TransformerBlock(config) for _ in range(config.n_layers)]
        super().__init__(config, vocab_size, losses, blocks, nn.LayerNorm(config.dim, config.norm_eps))
        self.pos_embeddings = nn.Embedding(config.max_seq_len, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def inputs(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return embedded tokens plus positions, (B, T, D)."""
        return self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(positions)), {}
