"""The tutorial's Transformer, made causal: learned positions, LayerNorm, GELU, dropout (the architecture of GPT-2).

Shapes: B sequences, T tokens, D dim, H heads, V vocabulary.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config import ModelConfig
from torchtitan_lite.loss import summed_cross_entropy

Fill = Callable[[str, Tensor, float], None]  # fills a parameter, given its name, with normal values of this deviation


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.dropout = config.dropout
        self.wq = nn.Linear(config.dim, config.dim)
        self.wk = nn.Linear(config.dim, config.dim)
        self.wv = nn.Linear(config.dim, config.dim)
        self.wo = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        q, k, v = (w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, H, T, D / H)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, 4 * config.dim)
        self.w2 = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each on a normalised copy of the residual stream and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.dim)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class Transformer(nn.Module):
    """Token and position embeddings, blocks, a last norm, and the output matrix."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.max_seq_len = config.max_seq_len
        self.tok_embeddings = nn.Embedding(vocab_size, config.dim)
        self.pos_embeddings = nn.Embedding(config.max_seq_len, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.output = nn.Linear(config.dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits, or the loss where targets are given.

        The loss is computed in here, and not by the caller, so that it happens while FSDP holds the whole output
        matrix: only then can it later be computed in chunks, without ever holding all logits.

        Args:
            tokens: (B, T) int64, T at most max_seq_len.
            targets: (B, T) int64, loss.IGNORE where there is nothing to learn.

        Returns:
            (B, T, V) logits, or the summed cross-entropy, () float32.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tok_embeddings(tokens) + self.pos_embeddings(positions))
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x))
        return logits if targets is None else summed_cross_entropy(logits, targets)

    @torch.no_grad()
    def reset_parameters(self, normal_: Fill) -> None:
        """Give every parameter its initial value.

            tensor                                   initial value (L = n_layers)
            *_embeddings, wq wk wv, w1, output       normal, deviation 0.02
            wo, w2 (they add to the residual)        normal, deviation 0.02 / sqrt(2 L)
            weights of norms                         1
            biases                                   0

        Args:
            normal_: fills one parameter; it is given the parameter's name so that the values need not depend on how
                the parameters are spread over ranks.
        """
        residual = 0.02 / math.sqrt(2 * len(self.layers))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                normal_(name, parameter, residual if name.endswith(("wo.weight", "w2.weight")) else 0.02)
