"""A loss term of your own: `train.py --model.family=examples.own_loss:SMALL` (docs/extending.md).

Activation regularization (Merity et al., 2017): Llama, with a penalty on the mean square of each block's output.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_lite.config.families import FAMILIES
from torchtitan_lite.models import llama
from torchtitan_lite.models.loss import IGNORE

WEIGHT = 2.0  # as in the paper


class Block(llama.TransformerBlock):
    """A block that, in training, also returns the mean square of its output at each token, (B, T)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = super().forward(x, *args, **kwargs)
        return (x, x.float().square().mean(-1)) if self.training else x


class SmallActivations(llama.Llama):
    """Llama with the penalty, averaged over the blocks."""

    block = Block

    def with_router_losses(self, loss: Tensor, routed: list[list[Tensor]], targets: Tensor) -> Tensor:
        """Return the token loss; the term, summed over the tokens with a target, contributes gradients only."""
        sizes = torch.stack([size for (size,) in routed]).mean(0)  # (B, T)
        term = WEIGHT * sizes[targets != IGNORE].sum()
        return loss + (term - term.detach())


SMALL = replace(FAMILIES["llama"], model=f"{__name__}:SmallActivations")
