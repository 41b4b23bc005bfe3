"""What the families share: the way from tokens to a loss, tied embeddings, initial values."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.models.attention import KeysValues, within_documents
from torchtitan_lite.models.loss import Head, of_each, summed_cross_entropy

Fill = Callable[[str, Tensor, float], None]  # fills a parameter, given its name, with normal values of this deviation


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
        matrix: only then can it be computed in chunks, without ever holding all logits (loss.py).

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
