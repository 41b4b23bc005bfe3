"""What the families share: the way from tokens to a loss, tied embeddings, initial values."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models.attention import MAX_SEQ_LEN, block_attention
from torchtitan_lite.models.head import Head
from torchtitan_lite.models.loss import of_each, summed_cross_entropy

Fill = Callable[[str, Tensor, float], None]  # fills a parameter, given its name, with normal values of this deviation


class KeysValues:
    """The keys and values of one block for the tokens so far: generation computes those of new tokens only."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Tokens so far."""
        return 0 if self._kept is None else self._kept[0].shape[1]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of T new tokens, (B, T, heads, width) each; returns those of all."""
        if self._kept is not None:
            k, v = torch.cat((self._kept[0], k), dim=1), torch.cat((self._kept[1], v), dim=1)
        self._kept = k, v
        return k, v


def within_documents(positions: Tensor, *, dense: bool) -> Any:
    """Which tokens each token may look at: itself and those before it in its document, which begins at position 0.

    Args:
        positions: (B, T) int64.
        dense: as a (B, 1, T, T) tensor of bool for scaled_dot_product_attention; else as a BlockMask for FlexAttention,
            which skips the blocks that lie in other documents.
    """
    documents = (positions == 0).cumsum(1)  # (B, T), a number for each
    if dense:
        return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    from torch.nn.attention import flex_attention as flex  # not needed, nor imported, without a GPU

    def allowed(batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[batch, q] == documents[batch, k])

    n, length = positions.shape
    return flex.create_block_mask(allowed, n, None, length, length, device=str(positions.device))


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Any = None, dropout: float = 0.0, *, by_blocks: bool = False
) -> Tensor:
    """Attention that looks back only, and with `mask` (of within_documents) only as far as it allows.

    Queries, keys and values, (B, T, H, E) each -> (B, T, H, E). Fewer queries than keys are the last ones.

    Args:
        by_blocks: use block_attention where it is the faster way.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    plain = mask is None and dropout == 0 and q.shape == k.shape and q.device.type == "cpu"
    if by_blocks and plain and q.shape[2] <= MAX_SEQ_LEN:
        mixed = block_attention(q, k, v)
    elif mask is None:
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **causal(q, k))
    elif isinstance(mask, Tensor):
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, attn_mask=mask)
    else:
        mixed = _flex_attention()(q, k, v, block_mask=mask)
    return mixed.transpose(1, 2)


@functools.cache
def _flex_attention() -> Callable[..., Tensor]:
    """FlexAttention as the one kernel that it is only when compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def causal(q: Tensor, k: Tensor) -> dict[str, Any]:
    """How attention is told to look back only: (B, heads, T, width) queries are the last T of the tokens of `k`."""
    n, of = q.shape[2], k.shape[2]
    if n == of:
        return {"is_causal": True}
    return {"attn_mask": torch.ones(n, of, dtype=torch.bool, device=q.device).tril(of - n)}


class Transformer(nn.Module):
    """Embeddings, blocks, a last norm, and the output matrix, which may be the embeddings themselves.

    A family gives it the modules and says what goes into the first block. Shapes: B sequences, T tokens, D dim, V
    vocabulary.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, blocks: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(vocab_size, config.dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.output = Head(config.dim, vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the output matrix the embeddings, if so configured."""
        if self.config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def inputs(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """What the first block takes: (B, T, D), and whatever goes to every block unchanged.

        Args:
            positions: (T,) int64, or (B, T) where sequences differ.
        """
        raise AssertionError("a family says it")

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: list[KeysValues] | None = None,
        positions: Tensor | None = None,
        *,
        per_sequence: bool = False,
    ) -> Tensor:
        """Logits, or the loss where targets are given.

        The loss is computed in here, and not by the caller, so that it can happen while FSDP holds the whole output
        matrix: only then can it be computed in chunks, without ever holding all logits (head.py).

        Args:
            tokens: (B, T) int64, T at most max_seq_len.
            targets: (B, T) int64, loss.IGNORE where there is nothing to learn.
            cache: of each block, when generating; `tokens` follow those that it has seen, and it is extended by them.
            positions: (B, T) int64, beginning with 0 in each document: attention stays within them. None: 0, 1, ...,
                and nothing is confined.
            per_sequence: return the loss of each sequence.

        Returns:
            (B, T, V) logits, or the summed cross-entropy, () float32; per sequence, (B,) float32.
        """
        more: list[Any] = []  # nothing where there is nothing: what is checkpointed or compiled stays as it was
        if positions is not None:
            # FlexAttention does not drop, and on the CPU it has no backward
            dense = not tokens.is_cuda or (self.training and self.config.dropout > 0)
            more = [None, within_documents(positions, dense=dense)]
        else:
            first = cache[0].length if cache else 0
            positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x, *unchanged = self.inputs(tokens, positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, *unchanged, cache[i]) if cache else layer(x, *unchanged, *more)
        x = self.norm(x)
        if targets is not None and self.output.chunked:
            return self.output(x, targets, per_sequence=per_sequence)
        logits: Tensor = self.output(x)
        if targets is None:
            return logits
        return of_each(summed_cross_entropy, logits, targets) if per_sequence else summed_cross_entropy(logits, targets)

    def reset_buffers(self) -> None:
        """Compute what is neither learned nor saved; a family with buffers says how."""

    @torch.no_grad()
    def reset_parameters(self, normal_: Fill) -> None:
        """Give every parameter its initial value, and compute the buffers: to_empty leaves both without values.

            tensor                                   initial value (L = n_layers)
            *_embeddings, wq wk wv, w1 w3, output    normal, deviation 0.02
            wo, w2 (they add to the residual)        normal, deviation 0.02 / sqrt(2 L)
            weights of norms                         1
            biases                                   0

        Args:
            normal_: fills one parameter; it is given the parameter's name so that the values need not depend on how
                the parameters are spread over ranks.
        """
        self.reset_buffers()
        residual = 0.02 / math.sqrt(2 * len(self.layers))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            else:
                normal_(name, parameter, residual if name.endswith(("wo.weight", "w2.weight")) else 0.02)
