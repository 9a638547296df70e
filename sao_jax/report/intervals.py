"""Confidence intervals for what a report states."""

import math
import statistics
from collections.abc import Sequence

from scipy import stats


def wilson(successes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a success rate.

    With p = successes / n and z the normal quantile of (1 + confidence) / 2:

      (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Unlike p +- z * standard error it stays inside [0, 1] and has a width at p = 0 and p = 1
    (Wilson, "Probable inference, the law of succession, and statistical inference", 1927).

    Returns:
      (low, high); (0, 1), which says nothing, for n = 0.

    Raises:
      ValueError: for successes outside [0, n] or a confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; allowed: between 0 and 1, both excluded")
    if n < 0 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}; allowed: 0 <= successes <= n")
    if n == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    p, shrink = successes / n, z * z / n
    centre = (p + shrink / 2) / (1 + shrink)
    half = math.sqrt(p * (1 - p) * shrink + shrink * shrink / 4) / (1 + shrink)
    # Rounding leaves 1e-17 where the exact bound is 0 or 1.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def mean_interval(sample: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high): mean +- t * s / sqrt(n) with Student's t of n - 1 degrees; bounds are NaN for n < 2.

    Values that are NaN are left out.
    """
    sample = [float(x) for x in sample if not math.isnan(x)]
    n = len(sample)
    if n == 0:
        return math.nan, math.nan, math.nan
    mean = statistics.fmean(sample)
    if n == 1:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * statistics.stdev(sample) / math.sqrt(n)
    return mean, mean - half, mean + half


def ratio_interval(ratios: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """`mean_interval` on the logarithm: half as much and twice as much lie equally far from the same.

    Raises:
      ValueError: a ratio that is not above 0.
    """
    if not all(r > 0 or math.isnan(r) for r in ratios):
        raise ValueError(f"ratios are {list(ratios)}; all must be above 0")
    mean, low, high = (math.exp(x) for x in mean_interval([math.log(r) for r in ratios], confidence))
    return mean, low, high
