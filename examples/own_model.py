"""A model family of your own: `train.py --model.family=examples.own_model:PARALLEL` (docs/own_model.md).

GPT with parallel attention and feed-forward (Wang and Komatsuzaki's GPT-J, PaLM): one norm per block.
"""

from typing import Any

from torch import Tensor, nn

from torchtitan_lite.config.families import GPT, Family
from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models import gpt
from torchtitan_lite.models.attention import KeysValues
from torchtitan_lite.models.loss import LossOptions
from torchtitan_lite.models.transformer import Transformer


class ParallelBlock(nn.Module):
    """Attention and feed-forward read the same normalized residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.attention = gpt.Attention(config)
        self.feed_forward = gpt.FeedForward(config)

    def forward(self, x: Tensor, cache: KeysValues | None = None, mask: Any = None) -> Tensor:
        """Map x (B, T, D) to (B, T, D)."""
        h = self.norm(x)
        return x + self.attention(h, cache=cache, mask=mask) + self.feed_forward(h)


class Parallel(Transformer):
    """GPT with learned positions and parallel blocks."""

    def __init__(self, config: ModelConfig, vocab_size: int, losses: LossOptions) -> None:
        blocks: list[nn.Module] = [ParallelBlock(config) for _ in range(config.n_layers)]
        super().__init__(config, vocab_size, losses, blocks, nn.LayerNorm(config.dim, config.norm_eps))
        self.pos_embeddings = nn.Embedding(config.max_seq_len, config.dim)

    def inputs(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return embedded tokens and positions, (B, T, D), and no other inputs of blocks."""
        return self.tok_embeddings(tokens) + self.pos_embeddings(positions), {}


PARALLEL = Family(f"{__name__}:Parallel", sizes=GPT, keys=("dropout",))
