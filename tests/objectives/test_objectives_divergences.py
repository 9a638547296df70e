"""KL estimators, exact divergences, entropy, and the controllers of a KL coefficient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives_jitted import fast

from sao_jax import objectives as obj

close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
NAN, INF = np.nan, np.inf


def test_k3_neither_cancels_nor_overflows():
    d = np.array([1e-4, -1e-4, 0.0, 29.0, -29.0, 100.0], np.float32)
    k3 = fast.kl_divergence(np.zeros(6), d, estimator="k3")
    np.testing.assert_allclose(k3[:5], [5.00017e-09, 4.99983e-09, 0.0, 3.93133e12, 28.0], rtol=0.01)
    assert np.isfinite(k3).all()
    assert (k3 >= 0).all()
    assert k3.dtype == jnp.float32


def test_k3_is_never_negative():
    d = np.concatenate([s * np.logspace(-9, 0, 400) for s in (-1, 1)]).astype(np.float32)
    k3 = np.asarray(fast.kl_divergence(np.zeros_like(d), d, estimator="k3"))
    assert (k3 >= 0).all()
    large = np.abs(d) > 1e-3
    exact = np.expm1(d.astype(np.float64)) - d.astype(np.float64)
    np.testing.assert_allclose(k3[large], exact[large], rtol=1e-3)


def test_estimators_by_hand():
    sample, target = np.array([-1.0, -2.0]), np.array([-1.5, -1.0])
    k1, k2, k3 = (fast.kl_divergence(sample, target, estimator=k) for k in ("k1", "k2", "k3"))
    close(k1, [0.5, -1.0])
    close(k2, [0.125, 0.5])
    close(k3, [np.exp(-0.5) - 1 + 0.5, np.exp(1.0) - 2])
    close(fast.kl_divergence(sample, target), k1)
    with pytest.raises(ValueError, match="k1, k2, k3"):
        obj.kl_divergence(sample, target, estimator="k4")


def test_estimators_agree_in_the_mean_with_the_exact_divergence():
    p_logits, q_logits = np.array([0.3, -0.5, 1.0]), np.array([0.0, 0.2, 0.5])
    p, q = jax.nn.log_softmax(p_logits), jax.nn.log_softmax(q_logits)
    exact = fast.categorical_kl(p_logits, q_logits)
    close(exact, (np.exp(p) * (p - q)).sum())
    for estimator in ("k1", "k3"):
        close((np.exp(p) * fast.kl_divergence(p, q, estimator=estimator)).sum(), exact)


def test_gradient_of_k3_pulls_towards_the_sampler():
    """d/dq k3 = exp(d) - 1: negative where q is below p, 0 at equality; and 0 where clamped or not finite."""
    p = np.array([-1.0, -1.0, -1.0, -1.0, NAN])
    q = np.array([-2.0, -1.0, -0.5, NAN, -1.0])
    gradient = jax.jit(jax.grad(lambda q: fast.kl_divergence(p, q, estimator="k3").sum()))(q)
    close(gradient, [np.expm1(-1.0), 0, np.expm1(0.5), 0, 0])
    for estimator in ("k1", "k2", "k3"):
        of_estimator = functools.partial(fast.kl_divergence, np.zeros(1), estimator=estimator)
        _, pullback = jax.vjp(of_estimator, np.full(1, 90.0, np.float32))
        assert pullback(np.ones(1, np.float32))[0] == 0


def test_masked_nan_leaves_mean_and_gradient():
    sample, target = np.array([-1.0, -2.0, NAN]), np.array([-1.5, -2.0, -3.0])
    mask = np.array([True, True, False])

    def mean(sample):
        return fast.masked_mean(fast.kl_divergence(sample, target, estimator="k1"), mask)

    value, gradient = jax.jit(jax.value_and_grad(mean))(sample)
    close(value, 0.25)
    close(gradient, [0.5, 0.5, 0.0])


def test_penalty_joins_the_loss_inside_the_masked_mean():
    policy, kl, mask = np.array([1.0, 1.0, 7.0]), np.array([0.5, 1.5, 30.0]), np.array([1, 1, 0])
    close(fast.masked_mean(policy + 0.1 * kl, mask), 1.1)
    more = [np.append(x, y) for x, y in ((policy, NAN), (kl, INF), (mask, 0))]
    close(fast.masked_mean(more[0] + 0.1 * more[1], more[2]), 1.1)


def test_measured_kl_counts_every_finite_action_token_with_a_bound():
    rollout = np.array([-1.0, -1.0, -60.0, NAN, -1.0, NAN])
    logp = np.array([-1.5, -1.0, -1.0, -1.0, -INF, -1.0])
    mask = np.array([1, 1, 1, 1, 1, 0])
    (total, count), gradient = jax.value_and_grad(lambda x: fast.rollout_kl(rollout, x, mask), has_aux=True)(logp)
    close(total, np.expm1(-0.5) + 0.5 + np.expm1(20.0) - 20.0)
    assert count == 3
    close(gradient, [np.expm1(-0.5), 0, 0, 0, 0, 0])


def test_masked_log_softmax_and_its_gradient():
    mask = np.array([1, 1, 0])
    graded = jax.jit(jax.value_and_grad(lambda x: fast.masked_log_softmax(x, mask)[0]))
    for hidden in (200.0, NAN, INF, -INF):
        value, gradient = graded(np.array([0.5, 1.5, hidden]))
        close(value, -1.31326169)
        close(gradient, [0.73105858, -0.73105858, 0.0])
    x = np.array([0.5, 1.5, 200.0])
    assert fast.masked_log_softmax(x, mask)[2] == -INF
    assert (fast.masked_log_softmax(x, np.zeros(3)) == -INF).all()
    close(fast.masked_log_softmax(x, np.ones(3)), jax.nn.log_softmax(x))


def test_entropy_with_impossible_outcomes_over_valid_rows():
    logits = np.array([[0, 0, 0, 0], [0, 0, -INF, -INF], [9, 0, 0, 0]])
    mask = np.array([1, 1, 0])

    def mean(logits):
        return fast.masked_mean(fast.entropy(logits), mask[: len(logits)])

    value, gradient = jax.jit(jax.value_and_grad(mean))(logits)
    close(value, 1.03972077)
    assert np.isfinite(gradient).all()
    assert (gradient[1, 2:] == 0).all()
    close(mean(logits[:2]), value)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_exact_divergence_and_entropy_equal_their_sums(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (2, 3, 5))
    p, q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    kl, entropy = exact(logits[0], logits[1])
    close(kl, (p * np.log(p / q)).sum(-1), rtol=1e-4, atol=1e-5)
    close(entropy, -(p * np.log(p)).sum(-1), rtol=1e-4, atol=1e-5)
    assert (np.asarray(kl) > -1e-6).all()


@jax.jit
def exact(p, q):
    return fast.categorical_kl(p, q), fast.entropy(p)


def test_exact_divergence_with_impossible_outcomes():
    close(fast.categorical_kl([0.0, 0.0, -INF], [0.0, 0.0, 0.0]), np.log(1.5))
    assert fast.categorical_kl([0.0, 0.0], [0.0, -INF]) == INF
    close(fast.categorical_kl([0.0, -INF], [0.0, -INF]), 0.0)
    gradient = jax.grad(lambda p: fast.categorical_kl(p, jnp.zeros(3)))(jnp.array([0.0, 0.0, -INF]))
    assert np.isfinite(gradient).all()


def test_coefficient_rises_above_the_target_and_never_below_zero():
    update = functools.partial(fast.update_kl_coefficient, target=0.05, step_size=2.0)
    close(update(0.0, 0.15), 0.2)
    close(update(0.2, 0.0), 0.1)
    assert update(0.01, 0.0) == 0
    close(update(0.3, NAN), 0.3)
    close(jax.jit(update)(0.0, 0.15), 0.2)
    for kw in ({"target": 0, "step_size": 1.0}, {"target": -1, "step_size": 1.0}, {"target": 0.05, "step_size": 0}):
        with pytest.raises(ValueError, match="above 0"):
            obj.update_kl_coefficient(0.1, 0.1, **kw)


def test_proportional_controller():
    coef = 0.2
    for kl, expected in ((0.55, 0.202), (3.0, 0.20604), (0.0, 0.2019192)):
        coef = fast.proportional_kl_coefficient(coef, kl, target=0.5, horizon=50, count=5)
        close(coef, expected)
    for kw in ({"target": 0, "horizon": 50}, {"target": 0.5, "horizon": 0}, {"target": -1, "horizon": 50}):
        with pytest.raises(ValueError, match="above 0"):
            obj.proportional_kl_coefficient(0.2, 0.1, count=5, **kw)


def test_vmap_and_jit():
    p, q = -np.arange(6.0).reshape(2, 3), -np.arange(6.0)[::-1].reshape(2, 3)
    for k in ("k1", "k2", "k3"):
        f = functools.partial(fast.kl_divergence, estimator=k)
        close(jax.jit(jax.vmap(f))(p, q), f(p, q))
