"""Means, ratios and paired differences of scores, with standard errors over independently drawn items.

An item is a sequence of the validation set, a document or a question.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Pair = tuple[Array, Array]  # by item: the values, and what their sum is divided by


def mean(values: Array) -> tuple[float, float]:
    """The mean of rates and its standard error, NaN for one value.

    Equal values show no spread, but 3 right answers of 3 do not prove a score of 1. The error is then that of Laplace's
    rule: the standard deviation of a rate of which n of n were observed, all rates being as likely before.
    """
    n = len(values)
    spread = float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return float(values.mean()), spread if spread != 0 else math.sqrt((n + 1) / (n + 3)) / (n + 2)


def ratio(values: Array, of: Array) -> tuple[float, float]:
    """sum(values) / sum(of), and its standard error over items; NaN where undefined.

    To first order, the error of a ratio R is that of the mean residual, values - R * of. If all `of` are equal, this is
    the usual standard error of a mean.
    """
    return ratio_difference((values, of), (np.zeros_like(values), of))


def ratio_difference(one: Pair, other: Pair) -> tuple[float, float]:
    """The ratio of one minus that of the other, on the same items, and its standard error: see `ratio`.

    Residuals are subtracted item by item: the errors of two models on one text are correlated.
    """
    totals = [float(of.sum()) for _, of in (one, other)]
    if not all(totals):
        return math.nan, math.nan
    ratios = [float(values.sum()) / total for (values, _), total in zip((one, other), totals, strict=True)]
    difference = ratios[0] - ratios[1]
    residuals = (one[0] - ratios[0] * one[1]) / totals[0] - (other[0] - ratios[1] * other[1]) / totals[1]
    return difference, _root_of_sum(float(np.square(residuals).sum()), len(residuals))


@dataclass(frozen=True)
class Sums:
    """Sums over n items of K values each, and of their products: all that a ratio and its error need.

    They are additive. So ranks can share them in place of the values, of which each rank has those of its own items.
    """

    n: int
    totals: Tensor  # (K,) float64
    products: Tensor  # (K, K) float64

    @classmethod
    def of(cls, values: Tensor) -> "Sums":
        """The sums of values (K, n), float64."""
        return cls(values.shape[1], values.sum(1), values @ values.T)

    def ratio(self, value: int, of: int) -> tuple[float, float]:
        """The ratio of two totals, named by their index, and its standard error: see `ratio`."""
        total = float(self.totals[of])
        if not total:
            return math.nan, math.nan
        ratio = float(self.totals[value]) / total
        p = self.products
        squares = float(p[value, value] - 2 * ratio * p[value, of] + ratio**2 * p[of, of])
        return ratio, _root_of_sum(max(squares, 0.0), self.n) / total


def _root_of_sum(squares: float, n: int) -> float:
    """The standard error of the sum of n residuals with these squares; NaN for one."""
    return math.sqrt(squares * n / (n - 1)) if n > 1 else math.nan


def plus_minus(value: float, stderr: float, digits: int) -> str:
    """The value and its standard error, which is left out where it is undefined."""
    return f"{value:.{digits}f}" + (f" +- {stderr:.{digits}f}" if math.isfinite(stderr) else "")
