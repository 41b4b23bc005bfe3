"""Llama, Qwen2 (`qkv_bias`), Qwen3 (`qk_norm`), Mistral (`window`) and SmolLM3 (layers without positions).

Weights have Hugging Face's layout, with rotary halves instead of pairs.

Shapes: B sequences, T tokens, D dim, H heads, K key and value heads, E head_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models.attention import KeysValues, attend
from torchtitan_lite.models.loss import LossOptions
from torchtitan_lite.models.rotary import rotary_tables
from torchtitan_lite.models.transformer import Transformer


class Attention(nn.Module):
    """Causal grouped-query attention; `model.layer_pattern` sets the window and the rotation."""

    norm: type[nn.Module] | None = None  # of each query head and each key head; None: as model.qk_norm says

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.window, self.rotates = config.windows[layer], config.layer_kinds[layer] != "nope"
        self.attend, self.rotate = attend, rotate  # cpu/ may replace them
        self.head_dim = config.dim_of_heads
        bias = config.qkv_bias
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=bias)
        self.wk = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=bias)
        self.wv = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=bias)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)
        norm = self.norm or (nn.RMSNorm if config.qk_norm else nn.Identity)
        self.q_norm, self.k_norm = norm(self.head_dim, config.norm_eps), norm(self.head_dim, config.norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KeysValues | None = None,
        mask: Any = None,
        added: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); cos and sin are (T, E) or (B, T, E) float32; `added` (B, T, K, E) adds to values"""
        q = self.normed_heads(self.wq(x), self.q_norm)  # (B, T, H, E)
        q = self.rotate(q, cos, sin) if self.rotates else q
        k = self.normed_heads(self.wk(x), self.k_norm)  # (B, T, K, E)
        k = self.rotate(k, cos, sin) if self.rotates else k
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        v = v if added is None else v + added
        if cache is not None:
            k, v = cache.extend(k, v)
        return self.wo(self.attend(q, k, v, mask=mask, window=self.window).flatten(2))

    def normed_heads(self, x: Tensor, norm: nn.Module) -> Tensor:
        """(B, T, H E) -> (B, T, H, E), each head normalised separately"""
        return norm(x.unflatten(-1, (-1, self.head_dim)))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head by its position; elements i and i + E / 2 form a pair. (B, T, H, E)"""
    x1, x2 = x.float().chunk(2, dim=-1)
    rotated_half = torch.cat((-x2, x1), dim=-1)
    return (x * cos.unsqueeze(-2) + rotated_half * sin.unsqueeze(-2)).type_as(x)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.dim_of_ffn, bias=False)  # the gate
        self.w2 = nn.Linear(config.dim_of_ffn, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.dim_of_ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection."""

    make_attention: Callable[[ModelConfig, int], nn.Module] = Attention
    make_feed_forward: Callable[[ModelConfig], nn.Module] = FeedForward

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = self.make_attention(config, layer)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = self.make_feed_forward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeysValues | None = None, mask: Any = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, cache=cache, mask=mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(Transformer):
    """Token embeddings, then blocks with rotary positions."""

    block: Callable[[ModelConfig, int], nn.Module] = TransformerBlock
    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int, losses: LossOptions) -> None:
        blocks: list[nn.Module] = [self.block(config, i) for i in range(config.n_layers)]
        super().__init__(config, vocab_size, losses, blocks, nn.RMSNorm(config.dim, config.norm_eps))
        shape = config.max_seq_len, config.dim_of_heads
        self.register_buffer("rope_cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("rope_sin", torch.empty(shape, dtype=torch.float32), persistent=False)

    def inputs(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return embedded tokens (B, T, D), and cos and sin of their positions, (T, E) or (B, T, E)."""
        return self.tok_embeddings(tokens), {"cos": self.rope_cos[positions], "sin": self.rope_sin[positions]}

    @torch.no_grad()
    def reset_buffers(self) -> None:
        cos, sin = rotary_tables(self.config)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(sin)
