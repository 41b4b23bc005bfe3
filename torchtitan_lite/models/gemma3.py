"""Gemma 3's text model: norms before and after each sublayer, two rotary bases, scaled embeddings, a gated GELU.

Shapes as in llama.py. Norms store weight - 1, as Gemma publishes them, so they start at 0.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models import llama
from torchtitan_lite.models.attention import KeysValues
from torchtitan_lite.models.loss import LossOptions
from torchtitan_lite.models.rotary import rotary_tables


class RMSNorm(nn.RMSNorm):
    """Multiplies by 1 + weight, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)"""
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class Attention(llama.Attention):
    """Normalises each query head and each key head separately."""

    norm = RMSNorm


class FeedForward(llama.FeedForward):
    """Two matrices with a gated GELU between them."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, with norms before and after each."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.table = int(config.layer_kinds[layer] == "window")  # index of the rotary table
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, layer)
        self.post_attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.post_ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeysValues | None = None, mask: Any = None) -> Tensor:
        """(B, T, D) -> (B, T, D); cos and sin are (2, T, E) or (2, B, T, E), float32"""
        attention = self.attention(self.attention_norm(x), cos[self.table], sin[self.table], cache=cache, mask=mask)
        x = x + self.post_attention_norm(attention)
        return x + self.post_ffn_norm(self.feed_forward(self.ffn_norm(x)))


class Gemma3(llama.Llama):
    """Llama with scaled embeddings, and two rotary tables: for full layers, then for windowed ones."""

    block = TransformerBlock
    initial_norm = 0.0

    def __init__(self, config: ModelConfig, vocab_size: int, losses: LossOptions) -> None:
        super().__init__(config, vocab_size, losses)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        for name in ("rope_cos", "rope_sin"):
            self.register_buffer(name, getattr(self, name).new_empty(2, *self.rope_cos.shape[-2:]), persistent=False)

    def inputs(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return embedded tokens (B, T, D), and cos and sin of their positions, (2, T, E) or (2, B, T, E)."""
        x = self.tok_embeddings(tokens) * self.config.dim**0.5
        return x, {"cos": self.rope_cos[:, positions], "sin": self.rope_sin[:, positions]}

    @torch.no_grad()
    def reset_buffers(self) -> None:
        for table, theta in enumerate((self.config.rope_theta, self.config.window_rope_theta)):
            cos, sin = rotary_tables(self.config.model_copy(update={"rope_theta": theta}))
            self.rope_cos[table].copy_(cos)
            self.rope_sin[table].copy_(sin)
