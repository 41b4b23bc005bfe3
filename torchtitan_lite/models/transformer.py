"""The base class of all model families, and the head: tokens to logits or loss, tied embeddings, initial values."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_lite.config.schema import ModelConfig
from torchtitan_lite.config.sections.log import Metric
from torchtitan_lite.models.attention import KeysValues
from torchtitan_lite.models.chunked_loss import chunked_cross_entropy
from torchtitan_lite.models.induction import Fill, with_induction_head
from torchtitan_lite.models.loss import LossOptions, summed_cross_entropy
from torchtitan_lite.models.masks import within_documents


class Transformer(nn.Module):
    """Embeddings, blocks, a final norm and the output matrix. A family defines the modules and `inputs`.

    Shapes: B sequences, T tokens, D dim, V vocabulary.
    """

    initial_norm = 1.0  # of norm weights
    metrics: Sequence[Metric] = ()  # of logged steps, besides log.metrics
    loads: Tensor | None = None  # with experts: (L, E) tokens per layer and expert in the micro-batches so far

    def __init__(
        self, config: ModelConfig, vocab_size: int, losses: LossOptions, blocks: list[nn.Module], norm: nn.Module
    ) -> None:
        super().__init__()
        self.config, self.losses = config, losses
        self.width = config.dim / config.mup_base_dim if config.mup_base_dim else 1.0  # muP's width multiplier
        self.tok_embeddings = nn.Embedding(vocab_size, config.dim)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.output = Head(config.dim, vocab_size, losses)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Use the embeddings as the output matrix, if configured."""
        if self.config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def block_groups(self) -> list[list[nn.Module]]:
        """Return the modules between inputs and head, in groups that FSDP gathers together."""
        return [[layer] for layer in self.layers]

    def new_cache(self) -> list[Any]:
        """Return an empty cache for each block, for generation."""
        return [KeysValues(window) for window in self.config.windows]

    def inputs(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the first block's input, (B, T, D), and keyword arguments of all blocks. Positions: (T,) or (B, T)."""
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: list[KeysValues] | None = None,
        positions: Tensor | None = None,
        *,
        per_sequence: bool = False,
    ) -> Tensor:
        """Compute logits, or the loss if targets are given.

        Args:
            tokens: (B, T) int64, T at most max_seq_len.
            targets: (B, T) int64, or loss.IGNORE.
            cache: from new_cache, for generation: has the earlier tokens, and is extended by these.
            positions: (B, T) int64, from 0 in each document; attention stays within documents. None: no documents, and
                T positions from 0, or from the number of cached tokens.
            per_sequence: return the loss of each sequence, without gradients.

        Returns:
            (B, T, V) logits, or the summed cross-entropy, () float32; per sequence, (B,) float32.
        """
        documents, windows = positions is not None, self.config.windows
        if positions is None:
            first = cache[0].length if cache else 0
            positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        # FlexAttention has no dropout, and no backward on the CPU
        dense = not tokens.is_cuda or (self.training and self.config.dropout > 0)
        masks: dict[int, Any] = {}  # by window
        for window in set(windows):
            if documents or (0 < window < tokens.shape[1] and not (dense or cache)):
                masks[window] = within_documents(positions.expand_as(tokens), dense=dense, window=window)
        x, shared = self.inputs(tokens, positions)
        routed: list[Any] = []  # what blocks return after x in training, such as router logits and choices
        for i, layer in enumerate(self.layers):
            x = layer(x, **shared, cache=cache[i] if cache else None, mask=masks.get(windows[i]))
            if isinstance(x, tuple):
                x, *more = x
                routed.append(more)
        loss = self.output.logits_or_loss(self.norm(x), targets, per_sequence=per_sequence)
        return self.with_router_losses(loss, routed, targets) if routed and targets is not None else loss

    def with_router_losses(self, loss: Tensor, routed: list[Any], targets: Tensor) -> Tensor:
        """Return the token loss, to which more losses contribute gradients only.

        For families whose blocks return more than x in training: experts, and loss terms (docs/extending.md).

        Args:
            loss: () float32, summed over the targets.
            routed: what each block has returned after x.
            targets: (B, T) int64, or IGNORE.
        """
        raise NotImplementedError

    def reset_buffers(self) -> None:
        """Compute the buffers, which are neither trained nor saved. For families that have some."""

    @torch.no_grad()
    def use_context(self, config: ModelConfig) -> None:
        """Use the windows and the rotary positions of this config from now on."""
        self.config = config
        self.reset_buffers()
        for layer, window in zip(self.layers, config.windows, strict=False):
            for module in layer.children():
                if hasattr(module, "window"):
                    module.window = window  # type: ignore[assignment]

    @torch.no_grad()
    def reset_parameters(self, normal_: Fill) -> None:
        """Fill every parameter and buffer, which `to_empty` leaves uninitialised.

            tensor                                   initial value (L = n_layers)
            *_embeddings, wq wk wv, w1 w3, output    N(0, std^2), std = 0.02
            wo, w2 (they add to the residual)        N(0, std^2), std = 0.02 / sqrt(2 L)
            norm weights                             1 (`initial_norm`)
            biases                                   0

        With model.mup_base_dim, block matrices are divided by sqrt(width), and output by width. For
        model.induction_head see induction.py.

        Args:
            normal_: fills one parameter. Its values are seeded by the name, so they need not depend on the sharding.
        """
        self.reset_buffers()
        residual = 0.02 / math.sqrt(2 * len(self.layers))
        scales = {"layers": self.width**-0.5, "output": 1 / self.width}
        if self.config.induction_head and self.config.has_room_for_induction:
            normal_ = with_induction_head(normal_, self.config, self.tok_embeddings.num_embeddings, self.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(self.initial_norm if name.endswith("norm.weight") else 0.0)
            else:
                std = residual if name.endswith(("wo.weight", "w2.weight")) else 0.02
                normal_(name, parameter, std * scales.get(name.partition(".")[0], 1.0))


class Head(nn.Linear):
    """The output matrix and the loss.

    With `chunked`, forward computes the loss and its gradients, so backward does not read the matrix. Otherwise forward
    returns all logits, FSDP casts them to fsdp.output_dtype, and `logits_or_loss` computes the loss from them.
    """

    linear, cross_entropy = staticmethod(F.linear), staticmethod(chunked_cross_entropy)  # cpu/ replaces them
    token_losses: Tensor | None = None  # of the last targets, (B T,) float32, without gradients

    def __init__(self, dim: int, vocab_size: int, losses: LossOptions) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.chunked, self.z_loss = losses.chunked, losses.z_loss

    def logits_or_loss(self, x: Tensor, targets: Tensor | None, *, per_sequence: bool = False) -> Tensor:
        """Compute what Transformer.forward returns from the last block's normalised outputs, (B, T, D)."""
        if targets is None:
            return self(x)
        loss, losses = self(x, targets) if self.chunked else summed_cross_entropy(self(x), targets, self.z_loss)
        self.token_losses = losses
        return losses.view(targets.shape).sum(1) if per_sequence else loss

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        """(B, T, D) -> (B, T, V) logits; with targets, (B, T) int64, what summed_cross_entropy returns."""
        if targets is None:
            return self.linear(x, self.weight)
        if x.dtype == torch.float16:
            # the chunked loss rounds gradients before the loss scale applies: small ones would become zero
            return summed_cross_entropy(self.linear(x, self.weight), targets, self.z_loss)
        return self.cross_entropy(x, self.weight, targets, self.z_loss)
