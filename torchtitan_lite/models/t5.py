"""T5 (Raffel et al., 2020), v1.0 and v1.1: an encoder, and a decoder that also attends to the encoder's output.

`layers` contains the encoder's blocks, then the decoder's. Attention is not scaled; the queries have smaller initial
values instead. Positions enter as a bias of the attention scores, learned for 32 buckets of distances, with one table
per stack. The model computes the biases once per forward and passes them to the blocks. A table in the first block, as
in Hugging Face's model, would make every block depend on the first one's gathered parameters.

Shapes: B sequences, T tokens of the encoder, S tokens of the decoder, D dim, H heads, E head_dim, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models.attention import WITHOUT_CUDNN, KeysValues
from torchtitan_lite.models.induction import Fill
from torchtitan_lite.models.loss import IGNORE, LossOptions
from torchtitan_lite.models.transformer import Transformer

PAD = 0  # pads the encoder's tokens, and starts the decoder's
BUCKETS = 32
MAX_DISTANCE = 128  # all larger distances share a bucket
MASKED = -1e30  # finite: a row with only masked keys (a surplus sequence) would otherwise become NaN


class Attention(nn.Module):
    """Multi-head attention without scaling."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attend = attend  # cpu/ may replace it
        self.head_dim = config.dim_of_heads
        self.dropout = config.dropout
        inner = config.n_heads * self.head_dim
        self.wq = nn.Linear(config.dim, inner, bias=False)
        self.wk = nn.Linear(config.dim, inner, bias=False)
        self.wv = nn.Linear(config.dim, inner, bias=False)
        self.wo = nn.Linear(inner, config.dim, bias=False)

    def forward(self, x: Tensor, source: Tensor | None, bias: Tensor, cache: KeysValues | None = None) -> Tensor:
        """(B, T, D), and (B, S, D) to attend to -> (B, T, D).

        Args:
            source: None: attend to the cache, without extending it.
            bias: added to the scores; it broadcasts to (B, H, T, S).
        """
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, E)
        if source is None:
            assert cache is not None
            k, v = cache.kept
        else:
            k, v = (w(source).unflatten(-1, (-1, self.head_dim)) for w in (self.wk, self.wv))  # (B, S, H, E)
            if cache is not None:
                k, v = cache.extend(k, v)
        dropout = self.dropout if self.training else 0.0
        return self.wo(self.attend(q, k, v, bias=bias, dropout=dropout).flatten(2))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Compute attention of (B, T, H, E) to (B, S, H, E) keys and values, with scores q k^T + bias -> (B, T, H, E)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    bias = bias.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    # of the kernels, only the efficient and the math one give the bias a gradient; a CPU ignores their order
    with sdpa_kernel(WITHOUT_CUDNN, set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
    return out.transpose(1, 2)


def buckets(distances: Tensor, *, both_ways: bool) -> Tensor:
    """Return the bucket of each distance, key minus query, int64. Small distances have their own, larger ones share.

    Larger distances are compared with integers, because a rounded logarithm could differ between devices.

    Args:
        both_ways: use half of the buckets for keys after the query. Otherwise such keys share bucket 0.
    """
    n = BUCKETS // 2 if both_ways else BUCKETS
    exact = n // 2
    far = distances.abs() if both_ways else (-distances).clamp(min=0)
    bucket = far.clamp(max=exact)
    for i in range(1, n - exact):
        bucket = bucket + (far >= math.ceil(exact * (MAX_DISTANCE / exact) ** (i / (n - exact)))).long()
    return bucket + n * (distances > 0) if both_ways else bucket


class FeedForward(nn.Module):
    """Two matrices with a ReLU between them, or a gated GELU (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.dim_of_ffn, bias=False)  # the gate, if there is one
        self.w2 = nn.Linear(config.dim_of_ffn, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.dim_of_ffn, bias=False) if config.gated else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        if self.w3 is None:
            return self.w2(self.dropout(F.relu(self.w1(x))))
        return self.w2(self.dropout(F.gelu(self.w1(x), approximate="tanh") * self.w3(x)))


class TransformerBlock(nn.Module):
    """Pre-norm attention, in the decoder also to the encoder's output, and feed-forward, each with a residual."""

    def __init__(self, config: ModelConfig, *, decodes: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        if decodes:
            self.cross_attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
            self.cross_attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        bias: Tensor,
        source: Tensor | None = None,
        source_bias: Tensor | None = None,
        own: KeysValues | None = None,
        cross: KeysValues | None = None,
    ) -> Tensor:
        """(B, S, D) -> (B, S, D).

        Args:
            bias: for attention to these tokens; it broadcasts to (B, H, S, S).
            source_bias: for attention to the encoder's tokens; None: this is a block of the encoder.
            source: the encoder's output, (B, T, D). None: `cross` has its keys and values.
        """
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, bias, own))
        if source_bias is not None:
            normed = self.cross_attention_norm(x)
            # FSDP casts only the first argument
            source = None if source is None else source.to(normed.dtype)
            x = x + self.dropout(self.cross_attention(normed, source, source_bias, cross))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class T5(Transformer):
    """Shared token embeddings, both stacks, and the output matrix."""

    start = PAD  # the decoder's first token

    def __init__(self, config: ModelConfig, vocab_size: int, losses: LossOptions) -> None:
        n_encoder, n_decoder = config.stacks
        blocks: list[nn.Module] = [
            TransformerBlock(config, decodes=i >= n_encoder) for i in range(n_encoder + n_decoder)
        ]
        super().__init__(config, vocab_size, losses, blocks, nn.RMSNorm(config.dim, config.norm_eps))
        self.encoder_bias = nn.Embedding(BUCKETS, config.n_heads)
        self.decoder_bias = nn.Embedding(BUCKETS, config.n_heads)
        self.encoder_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def block_groups(self) -> list[list[nn.Module]]:
        """Return one group per block; the encoder's final norm joins its last block."""
        groups = super().block_groups()
        groups[self.config.n_layers - 1].append(self.encoder_norm)
        return groups

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: list[KeysValues] | None = None,
        positions: Tensor | None = None,
        *,
        per_sequence: bool = False,
        answer: Tensor | None = None,
    ) -> Tensor:
        """Compute logits, or the loss if targets are given.

        Args:
            tokens: (B, T) int64, the encoder's; PAD where padded.
            targets: (B, S) int64, the decoder's, or loss.IGNORE.
            cache: from `new_cache`, for generation. The first call fills it; later calls encode nothing and take only
                new answer tokens.
            positions: must be None: documents can't share a sequence.
            per_sequence: return the loss of each sequence, without gradients.
            answer: (B, S) int64, the decoder's inputs. None: the targets, shifted by one after PAD.

        Returns:
            (B, S, V) logits, or the summed cross-entropy, () float32; per sequence, (B,) float32.
        """
        assert positions is None, "an encoder-decoder has no documents within a sequence"
        if answer is None:
            assert targets is not None, "give targets, or the decoder's inputs as answer"
            answer = shifted(targets)
        first = cache[0].length if cache else 0
        encoded = first > 0  # the encoder's keys and values are cached
        # One lookup makes one gradient of the table's size. Every call reads every table: FSDP's group of tables waits
        # for all of them.
        embedded = self.tok_embeddings(answer if encoded else torch.cat((tokens, answer), dim=1))
        source, x = embedded.split((embedded.shape[1] - answer.shape[1], answer.shape[1]), dim=1)
        padding = (tokens == PAD)[:, None, None]  # (B, 1, 1, T)
        encoder_bias = self._bias(self.encoder_bias, 0, source.shape[1], both_ways=True)  # (1, H, T, T)
        bias = self._bias(self.decoder_bias, first, x.shape[1], both_ways=False)  # (1, H, S, first + S)
        source_bias = torch.zeros(padding.shape, dtype=x.dtype, device=x.device).masked_fill(padding, MASKED)
        blocks = list(self.layers)
        encoder, decoder = blocks[: self.config.n_layers], blocks[self.config.n_layers :]
        memory = None if encoded else self._encode(encoder, source, encoder_bias.masked_fill(padding, MASKED))
        x = self.dropout(x)
        for i, layer in enumerate(decoder):
            own, cross = cache[2 * i : 2 * i + 2] if cache else (None, None)
            x = layer(x, bias=bias, source=memory, source_bias=source_bias, own=own, cross=cross)
        x = self.dropout(self.norm(x))
        if self.config.scale_output:
            x = x * self.config.dim**-0.5
        return self.output.logits_or_loss(x, targets, per_sequence=per_sequence)

    def _encode(self, blocks: list[nn.Module], x: Tensor, bias: Tensor) -> Tensor:
        """Encode embedded tokens, (B, T, D) -> (B, T, D)."""
        x = self.dropout(x)
        for layer in blocks:
            x = layer(x, bias)
        encoded: Tensor = self.dropout(self.encoder_norm(x))
        return encoded

    def _bias(self, table: nn.Embedding, first: int, n: int, *, both_ways: bool) -> Tensor:
        """Return the bias of queries first to first + n - 1 for all keys up to there, (1, H, n, first + n)."""
        keys = torch.arange(first + n, device=table.weight.device)
        distances = keys - keys[first:, None]
        bias: Tensor = table(buckets(distances, both_ways=both_ways)).permute(2, 0, 1)
        return (bias if both_ways else bias.masked_fill(distances > 0, MASKED))[None]

    def new_cache(self) -> list[KeysValues]:
        """Return empty caches for `forward`: one for self-attention and one for cross-attention per decoder block."""
        return [KeysValues() for _ in range(2 * self.config.stacks[1])]

    @torch.no_grad()
    def reset_parameters(self, normal_: Fill) -> None:
        """Fill every parameter with N(0, std^2), and norms with 1.

            tensor                                    std
            tok_embeddings                            1
            wq                                        (D E)^-0.5
            wk wv, w1 w3, position biases             D^-0.5
            attention's wo                            (H E)^-0.5
            w2                                        (feed-forward width)^-0.5
            output, unless tied                       D^-0.5

        These are the published values (Mesh TensorFlow's), except for output: its 1 would start at a loss above 50.
        """
        config = self.config
        stds = {
            "tok_embeddings.weight": 1.0,
            "wq.weight": (config.dim * config.dim_of_heads) ** -0.5,
            "wo.weight": (config.n_heads * config.dim_of_heads) ** -0.5,
            "w2.weight": config.dim_of_ffn**-0.5,
        }
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                known = (std for ending, std in stds.items() if name.endswith(ending))
                normal_(name, parameter, next(known, config.dim**-0.5))


def shifted(targets: Tensor) -> Tensor:
    """Return the decoder's inputs for targets (B, S): PAD, then all but the last, with PAD for IGNORE."""
    inputs = targets.roll(1, dims=1).masked_fill(targets.roll(1, dims=1) == IGNORE, PAD)
    inputs[:, 0] = PAD
    return inputs
