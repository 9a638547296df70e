"""Value loss, explained variance, value error."""

import functools
import json
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives_jitted import fast

from sao_jax import objectives as obj

close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
NAN, INF = np.nan, np.inf
T = 12


def test_loss_by_hand():
    total, count = fast.value_loss([1.0, 0.5, 9.0], [0.0, 1.0, -9.0], [1, 1, 0])
    close(total, 0.5 + 0.125)
    assert count == 2


def test_masked_tokens_contribute_exactly_nothing():
    loss = functools.partial(fast.value_loss, clip=0.2)
    mask = np.array([1, 1, 0])

    def of(values, returns, old):
        return loss(values, returns, mask, old_values=old)[0]

    graded = jax.jit(jax.value_and_grad(of))
    arguments = np.array([[1.0, 0.5, 2.0], [0.0, 1.0, 3.0], [0.9, 0.1, 4.0]])
    expected = graded(*arguments)
    for bad in (NAN, INF, -INF):
        spoiled = arguments.copy()
        spoiled[:, 2] = bad
        value, gradient = graded(*spoiled)
        assert value == expected[0]
        assert gradient.tolist() == expected[1].tolist()
        assert gradient[2] == 0


def test_clip_fraction_is_that_of_the_raw_move():
    moved, count = fast.value_clip_count([1.0, 0.05, 7.0], [0.0, 0.0, 0.0], [1, 1, 0], clip=0.2)
    assert moved / count == 0.5


def test_values_in_one_unit_are_not_clipped():
    """Raw old value 12 with mean 10 and deviation 2 is 1.0; the new one, 1.1, moved by 0.1 only."""
    normalise = lambda x: (np.asarray(x, float) - 10.0) / 2.0  # noqa: E731
    old, new, target = normalise([12.0]), np.array([1.1]), normalise([13.0])
    total, _ = fast.value_loss(new, target, [1], old_values=old, clip=0.2)
    close(total, 0.08)
    assert fast.value_clip_count(new, old, [1], clip=0.2)[0] == 0
    # In the mixed unit the move would count as clipped.
    assert fast.value_clip_count(new, [12.0], [1], clip=0.2)[0] == 1


def test_options_belong_together():
    one = np.zeros(1)
    for kw in ({"clip": 0.2}, {"old_values": one}):
        with pytest.raises(ValueError, match="belong together"):
            obj.value_loss(one, one, one, **kw)
    with pytest.raises(ValueError, match="clip must be above 0"):
        obj.value_loss(one, one, one, old_values=one, clip=0.0)
    with pytest.raises(AssertionError):
        obj.value_loss(np.zeros(3), np.zeros((3, 1)), np.zeros(3))


@jax.jit
def both_losses(values, returns, mask, old, clip):
    plain = jax.value_and_grad(fast.value_loss, has_aux=True)(values, returns, mask)
    clipped = jax.value_and_grad(lambda v: fast.value_loss(v, returns, mask, old_values=old, clip=clip), has_aux=True)(
        values
    )
    return plain, clipped


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_losses_equal_the_loop(seed):
    rng = np.random.default_rng(seed)
    values, returns, old = rng.normal(size=(3, T))
    mask, clip = rng.random(T) < 0.7, rng.uniform(0.1, 2.0)
    expected = clipped_expected = 0.0
    for t in np.flatnonzero(mask):
        v = old[t] + min(max(values[t] - old[t], -clip), clip)
        expected += 0.5 * (values[t] - returns[t]) ** 2
        clipped_expected += max(0.5 * (values[t] - returns[t]) ** 2, 0.5 * (v - returns[t]) ** 2)
    ((plain, count), gradient), ((clipped, _), _) = both_losses(values, returns, mask, old, clip)
    close(plain, expected)
    close(clipped, clipped_expected)
    close(gradient, np.where(mask, values - returns, 0))
    assert count == mask.sum()
    # A bound that is never reached clips nothing.
    (_, (unbound, _)) = jax.tree.map(np.asarray, both_losses(values, returns, mask, old, 1e3))
    close(unbound[0], expected)


def test_targets_are_fixed():
    def total(returns, old):
        return fast.value_loss(np.ones(2), returns, np.ones(2), old_values=old, clip=0.1)[0]

    for g in jax.grad(total, argnums=(0, 1))(np.zeros(2), np.zeros(2)):
        assert (g == 0).all()


@pytest.mark.parametrize(
    ("returns", "values", "mask", "expected"),
    [
        ([1.0, 1.0, 1.0], [0.2, 0.5, 0.9], [1, 1, 1], NAN),
        ([0.1, 0.1, 0.1], [0.2, 0.5, 0.9], [1, 1, 1], NAN),
        ([1.0], [0.5], [1], NAN),
        ([1.0, 2.0], [0.5, 0.5], [0, 0], NAN),
        ([0.0, 1.0, 50.0], [0.5, 0.5, -50.0], [1, 1, 0], 0.0),
        ([0.0, 1.0, NAN], [0.5, 0.5, INF], [1, 1, 0], 0.0),
        ([0.0, 1.0, 5.0], [0.0, 1.0, 5.0], [1, 1, 1], 1.0),
        ([0.0, 1.0, 5.0], [3.0, 4.0, 8.0], [1, 1, 1], 1.0),
        ([0.0, 1.0], [1.0, 0.0], [1, 1], -3.0),
    ],
)
def test_explained_variance(returns, values, mask, expected):
    got = float(fast.explained_variance(values, returns, mask))
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert json.loads(json.dumps(None if math.isnan(got) else got)) is None or not math.isnan(expected)


def test_value_error_in_percent_of_the_reward_range():
    got = fast.value_error([0.5, 0.2, NAN], [0.4, 0.5, 0.0], [1, 1, 0], reward_range=2.0)
    close(got, 100 * 0.2 / 2.0)
    assert np.isnan(fast.value_error([0.5], [0.4], [0], reward_range=1.0))
    with pytest.raises(ValueError, match="reward_range"):
        obj.value_error([0.5], [0.4], [1], reward_range=0.0)
