"""Means, ratios and paired differences of scores, with standard errors over independently drawn items.

An item is a sequence of the validation set, a document or a question.
"""

import math

import numpy as np
from numpy.typing import NDArray

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
    n, squares = len(residuals), float(np.square(residuals).sum())
    return difference, math.sqrt(squares * n / (n - 1)) if n > 1 else math.nan


def plus_minus(value: float, stderr: float, digits: int) -> str:
    """The value and its standard error, which is left out where it is undefined."""
    return f"{value:.{digits}f}" + (f" +- {stderr:.{digits}f}" if math.isfinite(stderr) else "")
