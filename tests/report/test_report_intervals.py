"""Intervals and the way numbers are written."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.report.intervals import ratio_interval, wilson
from sao_jax.report.text import duration, figure, number, printable


@pytest.mark.parametrize(
    ("successes", "n", "confidence", "low", "high"),
    [
        # By hand, z = 1.959964: centre (.8 + .19207)/1.38415, half sqrt(.8*.2*.38415 + .38415^2/4)/1.38415.
        (8, 10, 0.95, 0.490162, 0.943318),
        (5, 10, 0.95, 0.236593, 0.763407),
        # p = 0: z^2/n / (1 + z^2/n) = .384146/1.384146.
        (0, 10, 0.95, 0.0, 0.277533),
        (10, 10, 0.95, 0.722467, 1.0),
        # z = 1: (.5 + .25)/1.5 -+ sqrt(.25*.5 + .25/4)/1.5 = .5 -+ sqrt(.1875)/1.5.
        (1, 2, 0.682689492137, 0.5 - math.sqrt(0.1875) / 1.5, 0.5 + math.sqrt(0.1875) / 1.5),
    ],
)
def test_wilson_by_hand(successes, n, confidence, low, high):
    np.testing.assert_allclose(wilson(successes, n, confidence), (low, high), atol=1e-6)


def test_no_trial_says_nothing():
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize("arguments", [(3, 2), (-1, 2), (0, -1), (1, 2, 0.0), (1, 2, 1.0)])
def test_impossible_counts_are_refused(arguments):
    with pytest.raises(ValueError, match="allowed"):
        wilson(*arguments)


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0.5, 0.999))
def test_interval_holds_the_rate_and_mirrors(n, share, confidence):
    k = round(share * n)
    low, high = wilson(k, n, confidence)
    assert 0 <= low <= k / n <= high <= 1
    assert low < high
    np.testing.assert_allclose(wilson(n - k, n, confidence), (1 - high, 1 - low), atol=1e-9)


@pytest.mark.parametrize(
    ("value", "text"),
    [(8123.4, "8,123"), (0.42, "0.42"), (0.03123, "0.031"), (1.234, "1.23"), (3e-6, "3e-06"), (7, "7"), (0.0, "0"),
     (None, "-"), (float("nan"), "-"), (np.float32("inf"), "-"), (np.float32(0.5), "0.50"), ("fast", "fast")],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.012, "12 ms"), (0.4, "0.4 s"), (9.96, "10 s"), (59.6, "1:00"), (247, "4:07"), (3753, "1:02:33"),
     (None, "-"), (float("inf"), "-")],
)  # fmt: skip
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_a_mean_ratio_and_its_inverse_are_inverses():
    mean, low, high = ratio_interval([0.5, 2.0, 8.0])
    half = 4.302653 * math.log(4.0) / math.sqrt(3)  # Student's t of two degrees; the logarithms lie log 4 apart
    assert (mean, low, high) == pytest.approx((2.0, 2.0 * math.exp(-half), 2.0 * math.exp(half)))
    assert ratio_interval([2.0, 0.5, 0.125]) == pytest.approx((1 / mean, 1 / high, 1 / low))
    with pytest.raises(ValueError, match="must be above 0"):
        ratio_interval([1.0, 0.0])


def test_figures_are_named_as_they_are_read():
    assert figure("tokens_per_s", 8123.0) == "tokens/s 8,123"
    assert figure("logp_abs_diff", None) == "logp abs diff -"


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[2Jb\r\n\tc\x9b") == "a [2Jb   c "
