"""Likelihoods of tokens in padded batches, and the standard error of a ratio."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchtitan_lite.models import Transformer
from torchtitan_lite.models.loss import IGNORE


@dataclass(frozen=True)
class Window:
    """A piece of a document: inputs, and the targets that are predicted from them, IGNORE where there is none."""

    document: int
    tokens: list[int]
    targets: list[int]


def padded(batch: list[Window], device: torch.device) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a batch, (B, T) int64 each. Padding follows the inputs, which do not attend to it."""
    length = max(len(window.tokens) for window in batch)
    tokens = torch.zeros(len(batch), length, dtype=torch.int64)
    targets = torch.full((len(batch), length), IGNORE)
    for row, window in enumerate(batch):
        tokens[row, : len(window.tokens)] = torch.tensor(window.tokens)
        targets[row, : len(window.targets)] = torch.tensor(window.targets)
    return tokens.to(device), targets.to(device)


def losses(model: Transformer, batch: list[Window], device: torch.device) -> Tensor:
    """The summed loss of each window, (B,) float32."""
    return model(*padded(batch, device), per_sequence=True)


Sums = tuple[NDArray[np.float64], NDArray[np.float64]]  # by document: values, and what to divide their sum by


def ratio(values: NDArray[np.float64], of: NDArray[np.float64]) -> tuple[float, float]:
    """sum(values) / sum(of), and its standard error over documents; NaN where it is undefined.

    To first order, the error of a ratio R is that of the mean residual values - R of.
    """
    return ratio_difference((values, of), (np.zeros_like(values), of))


def ratio_difference(one: Sums, other: Sums) -> tuple[float, float]:
    """The ratio of one minus that of the other, on the same documents, and its standard error: see `ratio`."""
    totals = [float(of.sum()) for _, of in (one, other)]
    if not all(totals):
        return math.nan, math.nan
    ratios = [float(values.sum()) / total for (values, _), total in zip((one, other), totals, strict=True)]
    n, found = len(one[0]), ratios[0] - ratios[1]
    if n < 2:
        return found, math.nan
    residuals = (one[0] - ratios[0] * one[1]) / totals[0] - (other[0] - ratios[1] * other[1]) / totals[1]
    return found, math.sqrt(float(np.square(residuals).sum()) * n / (n - 1))
