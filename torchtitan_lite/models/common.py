"""What the families share: the way from tokens to a loss, tied embeddings, initial values."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchtitan_lite.config import ModelConfig
from torchtitan_lite.loss import summed_cross_entropy

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
        self.output = nn.Linear(config.dim, vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the output matrix the embeddings, if so configured."""
        if self.config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def inputs(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """What the first block takes: (B, T, D), and whatever goes to every block unchanged."""
        raise AssertionError("a family says it")

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
        x, *unchanged = self.inputs(tokens)
        for layer in self.layers:
            x = layer(x, *unchanged)
        logits: Tensor = self.output(self.norm(x))
        return logits if targets is None else summed_cross_entropy(logits, targets)

    @torch.no_grad()
    def reset_parameters(self, normal_: Fill) -> None:
        """Give every parameter its initial value; a family with buffers computes those too.

            tensor                                   initial value (L = n_layers)
            *_embeddings, wq wk wv, w1 w3, output    normal, deviation 0.02
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
