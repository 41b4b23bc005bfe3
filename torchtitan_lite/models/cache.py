"""The key-value cache of generation."""

import torch
from torch import Tensor


class KeysValues:
    """The key-value cache of one layer, for generation.

    Args:
        window: number of keys that a token sees, up to its own; older keys are dropped. 0: keep all.
    """

    def __init__(self, window: int = 0) -> None:
        self.length = 0  # tokens so far, including dropped ones
        self._window = window
        self.kept: tuple[Tensor, ...] = ()  # keys and values

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append T new tokens, (B, T, heads, E) each. Returns the keys and values that any of them can see."""
        self.length += k.shape[1]
        if self.kept:
            k, v = torch.cat((self.kept[0], k), dim=1), torch.cat((self.kept[1], v), dim=1)
        first = max(k.shape[1] + 1 - self._window, 0) if self._window else 0  # the first one that the next token sees
        self.kept = k[:, first:], v[:, first:]
        return k, v

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, (N,) int64, in this order; a sequence may be repeated."""
        self.kept = tuple(t[rows] for t in self.kept)
