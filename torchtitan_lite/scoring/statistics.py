"""Means, ratios and paired differences of scores, with standard errors over independently drawn items.

An item is a sequence of the validation set, a document or a question.
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Pair = tuple[Array, Array]  # by item: the values, and the sizes that divide their sum


def mean(values: Array) -> tuple[float, float]:
    """Return the mean of rates and its standard error, NaN for one value.

    Equal values have no spread, but 3 right answers of 3 do not prove a score of 1. The error is then that of Laplace's
    rule: the posterior std of a rate after n successes in n trials, with a uniform prior.
    """
    n = len(values)
    spread = float(values.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return float(values.mean()), spread if spread != 0 else math.sqrt((n + 1) / (n + 3)) / (n + 2)


def ratio(values: Array, sizes: Array) -> tuple[float, float]:
    """Return sum(values) / sum(sizes), and its standard error over items; NaN where undefined.

    To first order, the error of a ratio R is that of the mean residual, values - R * sizes. If all sizes are equal,
    this is the usual standard error of a mean.
    """
    return ratio_difference((values, sizes), (np.zeros_like(values), sizes))


def ratio_difference(one: Pair, other: Pair) -> tuple[float, float]:
    """Return the ratio of `one` minus that of `other` on the same items, and its standard error; see `ratio`.

    Residuals are subtracted item by item, because the errors of two models on the same text are correlated.
    """
    totals = [float(sizes.sum()) for _, sizes in (one, other)]
    if not all(totals):
        return math.nan, math.nan
    ratios = [float(values.sum()) / total for (values, _), total in zip((one, other), totals, strict=True)]
    difference = ratios[0] - ratios[1]
    residuals = (one[0] - ratios[0] * one[1]) / totals[0] - (other[0] - ratios[1] * other[1]) / totals[1]
    n, squares = len(residuals), float(np.square(residuals).sum())
    return difference, math.sqrt(squares * n / (n - 1)) if n > 1 else math.nan


def plus_minus(value: float | None, stderr: float | None, digits: int) -> str:
    """Format a value and its standard error, unless that is undefined. None: not finite, as in the records."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.{digits}f}" + (f" +- {stderr:.{digits}f}" if stderr is not None and math.isfinite(stderr) else "")
