"""Importance weights and policy losses: hand values, non-finite log-probs, gradients, limits."""

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
T = 12
NAN, INF = np.nan, np.inf


def weights_of(ratio, **kw):
    """Weights for given ratios, with a recorded log-prob that cancels."""
    base = np.full(len(ratio), -1.5, np.float32)
    return fast.importance_weights(base + np.log(np.array(ratio, np.float32)), base, **kw)


def loss_and_grad(loss, logp, *args, **kw):
    """(sum, count, gradient of the sum) of a loss in its first argument."""
    value = jax.jit(jax.value_and_grad(lambda x: loss(x, *args, **kw), has_aux=True))
    (total, count), gradient = value(jnp.asarray(logp, jnp.float32))
    return float(total), float(count), np.asarray(gradient)


# Weights


def test_mask_keeps_the_open_band():
    close(weights_of([0.69, 0.71, 1, 5.99, 6.01], low=0.7, high=6.0, outside="mask"), [0, 0.71, 1, 5.99, 0])
    low, high = obj.band_from_offsets(0.3, 5.0)
    close([low, high], [0.7, 6.0])


def test_clip_moves_to_the_edge():
    close(weights_of([0.05, 0.5, 12], low=0.1, high=10, outside="clip"), [0.1, 0.5, 10])


def test_band_has_two_sides_and_the_rules_differ():
    ratio = [0.1, 0.6, 1.0, 1.9, 10.0]
    close(weights_of(ratio, low=0.5, high=2.0), [0, 0.6, 1, 1.9, 0])
    close(weights_of(ratio, low=0.5, high=2.0, outside="clip"), [0.5, 0.6, 1, 1.9, 2])


def test_mask_sign_drops_only_what_the_update_pushes_out():
    ratio = [0.1, 0.1, 0.1, 1.0, 10.0, 10.0, 10.0]
    advantages = np.array([-1.0, 1.0, 0.0, -1.0, -1.0, 1.0, 0.0])
    got = weights_of(ratio, low=0.5, high=2.0, outside="mask_sign", advantages=advantages)
    close(got, [0, 0.1, 0.1, 1, 10, 0, 10])


def test_exactly_at_an_end_is_outside():
    """The band is open; exp(0) = 1 is exact, so the end can be hit."""
    zero = np.zeros(1)
    assert fast.importance_weights(zero, zero, low=1.0, high=2.0) == 0
    assert fast.importance_weights(zero, zero, low=0.5, high=1.0) == 0
    down, up = -np.ones(1), np.ones(1)
    assert fast.importance_weights(zero, zero, low=1.0, high=2.0, outside="mask_sign", advantages=down) == 0
    assert fast.importance_weights(zero, zero, low=1.0, high=2.0, outside="mask_sign", advantages=up) == 1


@pytest.mark.parametrize("outside", ["mask", "clip", "mask_sign"])
def test_non_finite_log_probs_weigh_nothing(outside):
    logp = np.array([-1.0, NAN, -INF, INF, -1.0, -1.0, -1.0, NAN])
    rollout = np.array([-1.0, -1.0, -1.0, -1.0, NAN, -INF, INF, NAN])
    # A negative advantage: mask_sign would keep an infinite ratio.
    got = fast.importance_weights(logp, rollout, low=0.1, high=10.0, outside=outside, advantages=-np.ones(8))
    assert got.tolist() == [1.0, 0, 0, 0, 0, 0, 0, 0]
    assert fast.truncated_weights(logp, rollout, cap=2.0).tolist() == [1.0, 0, 0, 0, 0, 0, 0, 0]


def test_truncated_weights():
    base = np.zeros(3)
    close(fast.truncated_weights(np.log([0.05, 1.5, 12.0]), base, cap=2.0), [0.05, 1.5, 2.0])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_weights_equal_the_definition(seed):
    rng = np.random.default_rng(seed)
    mu = rng.normal(-2, 1, T).astype(np.float32)
    pi = (mu + rng.normal(0, 2, T)).astype(np.float32)
    a = rng.normal(size=T).astype(np.float32)
    low, high = np.float32(rng.uniform(0, 1)), np.float32(rng.uniform(1, 9))
    r = np.exp(pi - mu)
    expected = {
        "clip": np.minimum(np.maximum(r, low), high),
        "mask": [x if low < x < high else 0 for x in r],
        "mask_sign": [0 if (x >= high and s > 0) or (x <= low and s < 0) else x for x, s in zip(r, a, strict=True)],
    }
    for outside, values in expected.items():
        close(fast.importance_weights(pi, mu, low=low, high=high, outside=outside, advantages=a), values)
    # An infinite band is plain importance sampling under every rule; a cap alone is the clip without a floor.
    for outside in expected:
        close(fast.importance_weights(pi, mu, low=0.0, high=INF, outside=outside, advantages=a), r)
    close(fast.truncated_weights(pi, mu, cap=high), fast.importance_weights(pi, mu, low=0.0, high=high, outside="clip"))


def test_extreme_ratio_is_finite_under_every_rule():
    logp, rollout = np.array([-1.0, -200.0]), np.array([-300.0, -1.0])
    for outside in ("mask", "clip", "mask_sign"):
        got = fast.importance_weights(logp, rollout, low=0.0, high=INF, outside=outside, advantages=-np.ones(2))
        assert np.isfinite(got).all()


def test_bands_that_are_none_are_refused():
    one = np.zeros(1)
    for low, high in ((-0.2, 2.0), (2.0, 0.5), (0.2, 0.2), (0.2, 0.28), (1.5, 2.0), (NAN, 2.0)):
        with pytest.raises(ValueError, match="not offsets"):
            obj.importance_weights(one, one, low=low, high=high)
        with pytest.raises(ValueError, match="not offsets"):
            obj.clipped_ratio_loss(one, one, one, one, low=low, high=high)
    with pytest.raises(TypeError):
        obj.importance_weights(one, one, low=0.5)
    with pytest.raises(ValueError, match="mask, clip, mask_sign"):
        obj.importance_weights(one, one, low=0.5, high=2.0, outside="clamp")
    with pytest.raises(ValueError, match="needs advantages"):
        obj.importance_weights(one, one, low=0.5, high=2.0, outside="mask_sign")
    with pytest.raises(ValueError, match="cap"):
        obj.truncated_weights(one, one, cap=0.0)
    with pytest.raises(AssertionError):
        obj.importance_weights(np.zeros(3), np.zeros((3, 1)), low=0.5, high=2.0)


def test_band_ends_are_traced():
    counted = jax.jit(lambda p, m, low, high: fast.importance_weights(p, m, low=low, high=high))
    for low, high in ((0.5, 2.0), (0.1, 10.0)):
        counted(np.zeros(2), np.zeros(2), low, high)
    assert counted._cache_size() == 1


# The detached loss


def test_weight_is_a_constant_of_the_loss():
    """The gradient of f * A * log pi with f detached; differentiating f as well would give (1 + log pi) times that."""
    rollout, advantages = np.array([-1.0, -1.2, -0.7]), np.array([1.0, -2.0, 0.5])

    def loss(logp):
        w = fast.importance_weights(logp, rollout, low=0.1, high=10.0, outside="clip")
        return fast.policy_loss(logp, w, advantages, np.ones(3))

    logp = np.array([-0.5, -1.5, -4.0])
    total, count, gradient = loss_and_grad(loss, logp)
    ratio = np.maximum(np.exp(logp - rollout), 0.1)
    close(gradient, -ratio * advantages)
    close(total, -(ratio * advantages * logp).sum())
    assert count == 3
    # A clipped token keeps its gradient, with the weight of the edge.
    assert gradient[2] == pytest.approx(-0.1 * 0.5)


def test_no_gradient_into_weights_and_advantages():
    def total(w, a):
        return fast.policy_loss(-jnp.ones(3), w, a, np.ones(3))[0]

    for g in jax.jit(jax.grad(total, argnums=(0, 1)))(jnp.ones(3), jnp.ones(3)):
        assert (g == 0).all()


def test_denominator_is_stated():
    """Five tokens of loss 1, two of them inside the band."""
    log_ratio = np.array([0.1, -1.6, 0.9, -9.0, 0.3])
    r = np.exp(log_ratio)
    kept = ((r > 0.5) & (r < 2.0)).astype(float)
    assert kept.tolist() == [1, 0, 0, 0, 1]
    inside = fast.importance_weights(log_ratio, np.zeros(5), low=0.5, high=2.0) != 0
    np.testing.assert_array_equal(inside, kept)
    logp, a, mask = -np.ones(5), np.ones(5), np.ones(5)
    total, count = fast.policy_loss(logp, kept, a, mask, denominator="kept")
    close(total / count, 1.0)
    total, count = fast.policy_loss(logp, kept, a, mask)
    close(total / count, 0.4)
    # Over kept tokens, deleting the rejected ones changes nothing.
    keep = kept > 0
    total, count = fast.policy_loss(logp[keep], kept[keep], a[keep], mask[keep], denominator="kept")
    close(total / count, 1.0)
    with pytest.raises(ValueError, match="action, kept"):
        obj.policy_loss(logp, kept, a, mask, denominator="all")


def test_excluded_rows_leave_the_denominator():
    """A cut-off row of 4 tokens, excluded by its mask, beside 8 tokens of loss 1."""
    mask = np.arange(8)[None] < np.array([8, 4])[:, None]
    mask[1] = False
    ones = np.ones((2, 8))
    total, count = jax.vmap(fast.policy_loss)(-ones, ones, ones, mask)
    close(total.sum() / count.sum(), 1.0)
    assert count.sum() == 8


def test_impossible_tokens_contribute_exactly_nothing():
    """Ratios 1, e^119 and 0.368: the outer two are outside the band on opposite sides."""
    rollout, advantages = np.array([-1.0, -120.0, -0.0001]), np.ones(3)

    def loss(logp):
        w = fast.importance_weights(logp, rollout, low=0.5, high=2.0)
        return fast.policy_loss(logp, w, advantages, np.ones(3), denominator="kept")

    total, count, gradient = loss_and_grad(loss, -np.ones(3))
    assert np.isfinite(total)
    assert count == 1
    assert gradient.tolist() == [-1.0, 0.0, 0.0]


@functools.partial(jax.jit, static_argnames="outside")
def weighted_with_gradient(logp, rollout, advantages, mask, *, outside):
    def loss(logp):
        w = obj.importance_weights(logp, rollout, low=0.1, high=10.0, outside=outside, advantages=advantages)
        return obj.policy_loss(logp, w, advantages, mask)

    (total, count), gradient = jax.value_and_grad(loss, has_aux=True)(logp)
    return total, count, gradient


@pytest.mark.parametrize("outside", ["mask", "clip", "mask_sign"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", ["logp", "rollout", "masked"])
def test_non_finite_tokens_change_nothing_else(outside, bad, place):
    logp, rollout = np.array([-1.0, -0.5, -2.0, -1.0]), np.array([-1.2, -0.6, -1.0, -1.0])
    advantages, mask = np.array([1.0, -1.0, 2.0, 3.0]), np.array([1, 1, 1, 0], bool)
    here = np.arange(4) == (3 if place == "masked" else 2)
    expected, _, slope = weighted_with_gradient(logp, rollout, advantages, mask & ~here, outside=outside)
    spoil = lambda x: np.where(here, bad, x)  # noqa: E731
    logp, rollout, advantages = {
        "logp": (spoil(logp), rollout, advantages),
        "rollout": (logp, spoil(rollout), advantages),
        "masked": (spoil(logp), spoil(rollout), spoil(advantages)),
    }[place]
    total, count, gradient = weighted_with_gradient(logp, rollout, advantages, mask, outside=outside)
    assert total == expected
    assert gradient.tolist() == slope.tolist()
    assert gradient[here] == 0
    assert count == 3


@pytest.mark.parametrize(("advantage", "after"), [(1.0, -0.31326169), (-1.0, -1.31326169)])
def test_a_step_raises_good_actions_and_lowers_bad_ones(advantage, after):
    def loss(logits):
        logp = jax.nn.log_softmax(logits)[:1]
        w = fast.importance_weights(logp, logp, low=0.5, high=2.0)
        return fast.policy_loss(logp, w, np.array([advantage]), np.ones(1))

    total, count, gradient = loss_and_grad(loss, np.zeros(2))
    close(gradient / count, np.array([-0.5, 0.5]) * advantage)
    close(total, 0.69314718 * advantage)
    logits = -gradient / count
    close(logits, np.array([0.5, -0.5]) * advantage)
    close(jax.nn.log_softmax(logits)[0], after)


def test_loss_sums_over_micro_batches():
    """Sums and counts add up; dividing once gives the loss of the whole, however the batch is cut."""
    rng = np.random.default_rng(0)
    logp, w, a = (rng.normal(size=(4, T)) for _ in range(3))
    mask = rng.random((4, T)) < 0.5
    total, count = fast.policy_loss(logp, w, a, mask)
    parts = [fast.policy_loss(logp[i], w[i], a[i], mask[i]) for i in range(4)]
    close(sum(p[0] for p in parts) / sum(p[1] for p in parts), total / count)
    close(jax.jit(jax.vmap(fast.policy_loss))(logp, w, a, mask)[0], [p[0] for p in parts])


# The clipped ratio


@pytest.mark.parametrize("hidden", [-200.0, -INF, NAN, -0.3])
def test_masked_tokens_leave_loss_and_gradient_of_the_clipped_ratio(hidden):
    total, count, gradient = loss_and_grad(
        fast.clipped_ratio_loss,
        [-1.0, -0.5, 0.0],
        np.array([-1.2, -0.5, hidden]),
        np.array([1.0, -1.0, 5.0]),
        np.array([1, 1, 0]),
        low=0.8,
        high=1.2,
    )
    close(total / count, -0.1)
    close(gradient / count, [0.0, 0.5, 0.0])


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_action_tokens_leave_the_clipped_ratio(bad):
    for logp, old in (([-1.0, -0.5, bad], [-1.2, -0.5, -1.0]), ([-1.0, -0.5, -1.0], [-1.2, -0.5, bad])):
        total, count, gradient = clipped_with_gradient(*map(np.array, (logp, old, [1.0, -1.0, 5.0], [1, 1, 1])))
        close(total, -np.exp(0.2) + 1.0)
        close(gradient, [-np.exp(0.2), 1.0, 0.0])
        assert gradient[2] == 0
        assert count == 3


def test_dual_clip_is_for_negative_advantages_only():
    ratio, advantages = np.array([0.5, 4.0, 0.5, 2.0, 4.0]), np.array([1.0, 1.0, -1.0, -1.0, -1.0])
    loss = functools.partial(fast.clipped_ratio_loss, low=0.8, high=1.2, dual_clip=3.0)
    per_token, _ = jax.jit(jax.vmap(loss))(np.log(ratio), np.zeros(5), advantages, np.ones(5))
    close(per_token, [-0.5, -1.2, 0.8, 2.0, 3.0])
    total, count = loss(np.log(ratio), np.zeros(5), advantages, np.ones(5))
    close(total, per_token.sum())
    assert count == 5


def test_ratio_is_against_the_recorded_log_prob():
    total, _, gradient = loss_and_grad(
        fast.clipped_ratio_loss, [-1.0], np.array([-2.0]), np.ones(1), np.ones(1), low=0.0, high=6.0
    )
    close(total, -2.71828183)
    close(gradient, [-2.71828183])


def test_unknown_options_are_refused():
    one = np.zeros(1)
    with pytest.raises(TypeError, match="dual_clipp"):
        obj.clipped_ratio_loss(one, one, one, one, low=0.8, high=1.2, dual_clipp=3.0)
    with pytest.raises(ValueError, match="dual_clip must be above 1"):
        obj.clipped_ratio_loss(one, one, one, one, low=0.8, high=1.2, dual_clip=0.5)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_clipped_ratio_equals_the_loop(seed):
    rng = np.random.default_rng(seed)
    old = rng.normal(-2, 1, T)
    logp, a, mask = old + rng.normal(0, 1, T), rng.normal(size=T), rng.random(T) < 0.7
    expected, slope = 0.0, np.zeros(T)
    for t in np.flatnonzero(mask):
        r = np.exp(logp[t] - old[t])
        plain, clipped = r * a[t], min(max(r, 0.8), 1.3) * a[t]
        objective, d = (plain, plain) if plain <= clipped else (clipped, 0.0)
        if a[t] < 0 and objective < 2.5 * a[t]:
            objective, d = 2.5 * a[t], 0.0
        expected, slope[t] = expected - objective, -d
    total, count, gradient = clipped_with_gradient(logp, old, a, mask)
    close(total, expected, rtol=1e-4)
    close(gradient, slope, rtol=1e-4)
    assert count == mask.sum()


@jax.jit
def clipped_with_gradient(logp, old, a, mask):
    loss = functools.partial(fast.clipped_ratio_loss, low=0.8, high=1.3, dual_clip=2.5)
    (total, count), gradient = jax.value_and_grad(loss, has_aux=True)(logp, old, a, mask)
    return total, count, gradient


def test_on_policy_the_losses_share_their_gradient():
    """At ratio 1 the clipped ratio, the weighted loss and REINFORCE point the same way."""
    logp, a, mask = np.array([-1.0, -0.3, -2.0]), np.array([1.0, -2.0, 0.5]), np.array([1, 1, 0])
    w = fast.importance_weights(logp, logp, low=0.5, high=2.0)
    g_weighted = loss_and_grad(fast.policy_loss, logp, w, a, mask)[2]
    g_clipped = loss_and_grad(fast.clipped_ratio_loss, logp, logp, a, mask, low=0.5, high=2.0)[2]
    close(g_weighted, -a * mask)
    close(g_clipped, -a * mask)


# One ratio per sequence


def test_sequence_ratio():
    log_ratio = np.array([[0.2, 0.4, 9.0], [150.0, 250.0, 0.0], [5.0, 5.0, 5.0]])
    mask = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    ratio, gradient = jax.jit(jax.vmap(jax.value_and_grad(fast.sequence_ratio)))(log_ratio, np.zeros((3, 3)), mask)
    assert ratio[0] == pytest.approx(1.34985881)
    assert ratio[1] == pytest.approx(np.exp(20.0), rel=1e-5)
    assert ratio[2] == 0
    assert np.isfinite(gradient).all()
    close(gradient[0], [1.34985881 / 2, 1.34985881 / 2, 0])
    assert (gradient[1:] == 0).all()
    with_nan = fast.sequence_ratio(np.array([0.2, 0.4, NAN]), np.zeros(3), np.ones(3))
    assert with_nan == pytest.approx(1.34985881)


# What an update reports


def test_band_counts_by_side_and_sign():
    ratio = np.array([0.1, 0.1, 0.1, 1.0, 10.0, 10.0, 10.0, 0.1, 1.0])
    advantages = np.array([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, -1.0, 0.0, 1.0])
    mask = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1], bool)
    logp = np.append(np.log(ratio), [np.log(0.1), NAN])
    rollout, advantages = np.zeros(11), np.append(advantages, [1.0, 1.0])
    counts, count = fast.band_counts(logp, rollout, advantages, mask, low=0.5, high=2.0)
    assert count == 10
    assert {k: int(v) for k, v in counts.items()} == {
        "nonfinite": 1, "low": 4, "low_pos": 1, "low_neg": 2, "high": 3, "high_pos": 2, "high_neg": 1,
    }  # fmt: skip


def test_drift_sums_and_largest_ratio():
    logp, rollout = np.array([-1.0, -2.0, NAN, -3.0]), np.array([-1.5, -1.0, -1.0, NAN])
    mask = np.array([1, 1, 1, 0])
    sums, count = fast.drift_sums(logp, rollout, mask)
    r = np.exp([0.5, -1.0])
    assert count == 2
    close(sums["ratio"], r.sum())
    close(sums["ratio_sq"], (r**2).sum())
    close(sums["logp_abs_diff"], 1.5)
    close(sums["kl"], (r - 1 - np.log(r)).sum())
    close(fast.largest_ratio(logp, rollout, mask), r.max())
    close(sums["ratio"] ** 2 / (2 * sums["ratio_sq"]), fast.effective_sample_size([0.5, -1.0], [1, 1]))


def test_first_token_of_a_pack_is_not_scored():
    scored = fast.scored_tokens([0, 1, 1, 1, 1], [1, 1, 1, 2, 2])
    pairs = [[int(t) - 1, int(t)] for t in np.flatnonzero(scored)]
    assert pairs == [[0, 1], [1, 2], [3, 4]]
    assert fast.scored_tokens([1, 1, 1], [1, 1, 0]).tolist() == [False, True, False]
    assert fast.scored_tokens([1, 1, 0, 1]).tolist() == [False, True, False, True]
