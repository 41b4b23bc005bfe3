"""OLMo 2 and OLMo 3: a norm after each sublayer, not before it; query and key norms span all heads."""

from typing import Any

from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models import llama
from torchtitan_lite.models.attention import KeysValues


class Attention(llama.Attention):
    """Normalises all query heads together, and all key heads together."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.q_norm = nn.RMSNorm(config.n_heads * self.head_dim, config.norm_eps)
        self.k_norm = nn.RMSNorm(config.kv_heads * self.head_dim, config.norm_eps)

    def normed_heads(self, x: Tensor, norm: nn.Module) -> Tensor:
        """(B, T, H E) -> (B, T, H, E), all heads normalised together"""
        return norm(x).unflatten(-1, (-1, self.head_dim))


class TransformerBlock(llama.TransformerBlock):
    """Post-norm attention and feed-forward, each with a residual connection."""

    make_attention = Attention

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeysValues | None = None, mask: Any = None) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        x = x + self.attention_norm(self.attention(x, cos, sin, cache=cache, mask=mask))
        return x + self.ffn_norm(self.feed_forward(x))


class Olmo(llama.Llama):
    """Llama with post-norm blocks."""

    block = TransformerBlock
