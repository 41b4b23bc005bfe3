"""OLMo 2 and OLMo 3: a norm after each sublayer instead of before it, and norms over all queries and all keys."""

from typing import Any

from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models import llama
from torchtitan_lite.models.attention import KeysValues


class Attention(llama.Attention):
    """The queries of all heads have one norm, and so have the keys."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.q_norm = nn.RMSNorm(config.n_heads * self.head_dim, config.norm_eps)
        self.k_norm = nn.RMSNorm(config.kv_heads * self.head_dim, config.norm_eps)

    def normed_heads(self, x: Tensor, norm: nn.Module) -> Tensor:
        """(B, T, H E) -> (B, T, H, E), all heads normalised together"""
        return norm(x).unflatten(-1, (-1, self.head_dim))


class TransformerBlock(llama.TransformerBlock):
    """Attention and feed-forward of the residual stream as it is; what they add to it is normalised."""

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__(config, layer)
        self.attention = Attention(config, layer)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeysValues | None = None, mask: Any = None) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        x = x + self.attention_norm(self.attention(x, cos, sin, cache=cache, mask=mask))
        return x + self.ffn_norm(self.feed_forward(x))


class Olmo(llama.Llama):
    """Llama with these blocks."""

    block = TransformerBlock
