"""Losses of related methods: worked values, NumPy loops, and what each reduces to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.objectives import (
    beta_tracker,
    cispo_loss,
    clipped_ratio_loss,
    decoupled_ppo_loss,
    gspo_loss,
    icepop_loss,
    importance_weights,
    interpolated_logp,
    policy_loss,
    sequence_mask,
)


@pytest.fixture
def tokens():
    rng = np.random.default_rng(0)
    T = 17
    mu = -rng.gamma(2.0, size=T).astype(np.float32)
    return {
        "logp": jnp.asarray(mu + rng.normal(size=T).astype(np.float32)),
        "prox": jnp.asarray(mu + 0.3 * rng.normal(size=T).astype(np.float32)),
        "mu": jnp.asarray(mu),
        "adv": jnp.asarray(rng.normal(size=T).astype(np.float32)),
        "mask": jnp.asarray(rng.random(T) < 0.7),
    }


def value_and_grad(loss, logp):
    """(sum, count, gradient of the sum)."""
    total, count = loss(logp)
    return float(total), float(count), np.asarray(jax.grad(lambda p: loss(p)[0])(logp))


def assert_same(a, b, **tolerance):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, **({"rtol": 1e-5, "atol": 1e-6} | tolerance))


def test_cispo_is_the_policy_loss_with_clipped_weights(tokens):
    t = tokens
    weights = importance_weights(t["logp"], t["mu"], low=0.0, high=1.28, outside="clip")
    assert_same(
        value_and_grad(lambda p: cispo_loss(p, t["mu"], t["adv"], t["mask"], low=0.0, high=1.28), t["logp"]),
        value_and_grad(lambda p: policy_loss(p, weights, t["adv"], t["mask"]), t["logp"]),
    )


def test_gspo_worked_by_hand():
    # log r = .2 and .4 at the action tokens, so s = exp(.3) = 1.349859; clipped to 1.2 where A > 0.
    logp, mu = jnp.array([-0.8, -9.0, -0.6]), jnp.array([-1.0, -1.0, -1.0])
    mask, adv = jnp.array([1, 0, 1]), jnp.array([2.0, 5.0, -1.0])
    total, count = gspo_loss(logp, mu, adv, mask, low=0.8, high=1.2)
    np.testing.assert_allclose(total, -(1.2 * 2.0 + 1.349859 * -1.0), rtol=1e-6)
    assert count == 2
    gradient = jax.grad(lambda p: gspo_loss(p, mu, adv, mask, low=0.8, high=1.2)[0])(logp)
    # Only the token with A < 0 is not clipped; s depends on both action tokens by half.
    np.testing.assert_allclose(gradient, [1.349859 / 2, 0.0, 1.349859 / 2], rtol=1e-6)


def test_gspo_of_one_token_is_the_clipped_ratio(tokens):
    t = tokens
    mask = jnp.arange(17) == 5
    band = dict(low=0.8, high=1.2)
    assert_same(
        value_and_grad(lambda p: gspo_loss(p, t["mu"], t["adv"], mask, **band), t["logp"]),
        value_and_grad(lambda p: clipped_ratio_loss(p, t["mu"], t["adv"], mask, **band), t["logp"]),
    )


def test_decoupled_ppo_against_a_loop(tokens):
    t = {k: np.asarray(v, np.float64) for k, v in tokens.items()}
    expected = 0.0
    for p, q, mu, a, m in zip(t["logp"], t["prox"], t["mu"], t["adv"], t["mask"], strict=True):
        r = np.exp(p - q)
        expected -= m * np.exp(q - mu) * min(r * a, min(max(r, 0.8), 1.28) * a)
    total, count = decoupled_ppo_loss(*(tokens[k] for k in ("logp", "prox", "mu", "adv", "mask")), low=0.8, high=1.28)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert count == t["mask"].sum()


def test_decoupled_ppo_lies_between_ppo_and_importance_sampling(tokens):
    t, band = tokens, dict(low=0.8, high=1.2)

    def decoupled(prox):
        return value_and_grad(lambda p: decoupled_ppo_loss(p, prox, t["mu"], t["adv"], t["mask"], **band), t["logp"])

    assert_same(
        decoupled(t["mu"]),
        value_and_grad(lambda p: clipped_ratio_loss(p, t["mu"], t["adv"], t["mask"], **band), t["logp"]),
    )
    weights = importance_weights(t["logp"], t["mu"], low=0.0, high=jnp.inf, outside="mask")
    _, count, gradient = decoupled(t["logp"])
    assert_same(
        (count, gradient),
        value_and_grad(lambda p: policy_loss(p, weights, t["adv"], t["mask"]), t["logp"])[1:],
    )


def test_icepop_at_the_current_policy_has_the_gradient_of_the_mask_rule(tokens):
    t = tokens
    weights = importance_weights(t["logp"], t["mu"], low=0.5, high=2.0, outside="mask")
    assert 0 < np.sum(np.asarray(weights) == 0) < 17
    kept = dict(mask_low=0.5, mask_high=2.0, low=0.8, high=1.2)
    assert_same(
        value_and_grad(lambda p: icepop_loss(p, t["logp"], t["mu"], t["adv"], t["mask"], **kept), t["logp"])[1:],
        value_and_grad(lambda p: policy_loss(p, weights, t["adv"], t["mask"]), t["logp"])[1:],
    )


def test_icepop_keeps_the_ends_of_its_band():
    zero, one = jnp.zeros(3), jnp.ones(3)
    prox = jnp.log(jnp.array([0.5, 2.0, 2.01]))
    total, _ = icepop_loss(prox, prox, zero, one, one, mask_low=0.5, mask_high=2.0, low=0.8, high=1.2)
    np.testing.assert_allclose(total, -2.5, rtol=1e-6)


def test_interpolated_logp_goes_from_the_sampling_to_the_current_policy(tokens):
    p, mu = tokens["logp"], tokens["mu"]
    np.testing.assert_array_equal(interpolated_logp(p, mu, 1), mu)
    np.testing.assert_allclose(interpolated_logp(p, mu, 0), p, rtol=1e-6)
    np.testing.assert_allclose(interpolated_logp(p, mu, 4), mu + 0.75 * (p - mu), rtol=1e-6)
    np.testing.assert_allclose(interpolated_logp(p, mu, 1e9), p, rtol=1e-5)
    assert not np.any(jax.grad(lambda p: interpolated_logp(p, mu, 4).sum())(p))


def test_sequence_mask_is_decided_by_the_mean_k3():
    mu, mask = jnp.zeros(3), jnp.array([1, 1, 0])
    logp = jnp.array([0.5, -0.5, 99.0])  # k3 = e^.5 - 1 - .5 and e^-.5 - 1 + .5: mean .127626
    assert sequence_mask(logp, mu, mask, delta=0.128) == 1
    assert sequence_mask(logp, mu, mask, delta=0.127) == 0
    assert sequence_mask(logp, mu, jnp.zeros(3), delta=0.1) == 1
    with pytest.raises(ValueError, match="delta must be above 0"):
        sequence_mask(logp, mu, mask, delta=0.0)


def test_beta_tracker_worked():
    advantage, a, b = beta_tracker(3.0, 1.0, 1.0, kl=0.06)  # rho = 1/2
    np.testing.assert_allclose([advantage, a, b], [0.25, 2.5, 0.5], rtol=1e-6)
    _, a, b = beta_tracker(3.0, 1.0, 0.0, kl=1.0)  # rho is at least 1/2
    np.testing.assert_allclose([a, b], [1.5, 1.5], rtol=1e-6)


def test_beta_tracker_without_drift_is_the_running_mean():
    rewards = np.random.default_rng(1).integers(0, 2, 50).astype(float)
    a, b = 1.0, 1.0
    for n, r in enumerate(rewards):
        advantage, a, b = beta_tracker(a, b, r)
        np.testing.assert_allclose(advantage, r - (1 + rewards[:n].sum()) / (2 + n), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("where", ["logp", "mu"])
def test_a_token_that_is_not_finite_adds_exactly_nothing(tokens, bad, where):
    t = dict(tokens)
    index = int(np.flatnonzero(np.asarray(t["mask"]))[3])
    t[where] = t[where].at[index].set(bad)
    without = tokens["mask"].at[index].set(False)
    losses = (
        lambda p, mu, m: gspo_loss(p, mu, t["adv"], m, low=0.8, high=1.2),
        lambda p, mu, m: cispo_loss(p, mu, t["adv"], m, low=0.0, high=2.0),
        lambda p, mu, m: decoupled_ppo_loss(p, mu, mu, t["adv"], m, low=0.8, high=1.2),
        lambda p, mu, m: icepop_loss(p, p, mu, t["adv"], m, mask_low=0.1, mask_high=9.0, low=0.8, high=1.2),
    )
    for loss in losses:
        got, _, gradient = value_and_grad(lambda p, f=loss: f(p, t["mu"], t["mask"]), t["logp"])
        expected, _, clean = value_and_grad(lambda p, f=loss: f(p, tokens["mu"], without), tokens["logp"])
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient, clean, rtol=1e-5, atol=1e-6)
        assert gradient[index] == 0
