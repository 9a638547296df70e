import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.rollout.sampling import check_temperature, cut_at_stop, sample_tokens, token_uniforms

sample = jax.jit(sample_tokens)


def _uniforms(seed=7, rollout=0, attempt=0, index=range(16)):
    return np.asarray(
        token_uniforms(jax.random.key(seed), np.array([rollout]), np.array([attempt]), np.array(index)[None])
    )[0]


def test_logp_divides_logits_by_the_temperature():
    # exp(2 * [2, 1, 0]): the middle token has log-prob 2 - log(e^4 + e^2 + 1).
    logits = jnp.array([[2.0, 1.0, 0.0]])
    cdf = np.cumsum(np.exp([4.0, 2.0, 0.0]) / np.exp([4.0, 2.0, 0.0]).sum())
    token, logp = sample(logits, jnp.array([(cdf[0] + cdf[1]) / 2]), jnp.array([0.5]))
    assert token[0] == 1
    np.testing.assert_allclose(logp[0], -2.14293163, atol=1e-6)


def test_zero_and_tiny_temperatures_take_the_best_token_with_finite_logp():
    logits = jnp.tile(jnp.array([[1.0, 3.0, 2.0]]), (3, 1))
    token, logp = sample(logits, jnp.array([0.999, 0.0, 0.999]), jnp.array([0.0, 1e-9, 1e-9]))
    np.testing.assert_array_equal(token, [1, 1, 1])
    # Greedy reports the log-prob at T = 1: 3 - log(e + e^3 + e^2).
    np.testing.assert_allclose(logp, [3 - np.log(np.exp([1.0, 2.0, 3.0]).sum()), 0, 0], atol=1e-6)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), 1e-12])
def test_other_temperatures_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        check_temperature(temperature)


def test_tokens_with_logit_minus_infinity_are_never_drawn():
    u = jnp.linspace(0, 1, 257)[:256]
    logits = jnp.tile(jnp.array([[0.0, -jnp.inf, 1.0]]), (256, 1))
    temperature = jnp.where(jnp.arange(256) % 2 == 0, 0.0, 1.0)
    token, logp = sample(logits, u, temperature)
    assert set(np.asarray(token[::2])) == {2}
    assert set(np.asarray(token[1::2])) == {0, 2}
    assert np.isfinite(logp).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_draws_match_a_loop_over_the_cumulative_distribution(seed):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(16, 70)) * rng.choice([0.1, 3, 30])).astype(np.float32)
    u, temperature = rng.random(16).astype(np.float32), rng.choice([0.5, 1.0, 2.0], 16).astype(np.float32)
    token, logp = sample(logits, u, temperature)
    for row in range(16):
        z = logits[row].astype(np.float64) / temperature[row]
        p = np.exp(z - z.max())
        cdf = np.cumsum(p / p.sum())
        t = int(token[row])
        # Within rounding of the float32 cumulative sum.
        assert (cdf[t - 1] if t else 0) - 2e-6 <= u[row] <= cdf[t] + 2e-6
        np.testing.assert_allclose(logp[row], np.log(p[t] / p.sum()), atol=2e-5)


def test_frequencies_follow_the_distribution():
    n, p = 20_000, np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    u = _uniforms(index=np.arange(n))
    logits = jnp.tile(jnp.log(jnp.array(p, jnp.float32)), (n, 1))
    token, _ = sample(logits, u, jnp.ones(n))
    count = np.bincount(token, minlength=5)
    assert count[1] == 0
    np.testing.assert_allclose(count / n, p, atol=4 * np.sqrt(0.25 / n))


def test_uniforms_depend_on_seed_rollout_attempt_and_index_only():
    base = _uniforms()
    np.testing.assert_array_equal(base, _uniforms())
    np.testing.assert_array_equal(base[5:], _uniforms(index=np.arange(5, 16)))
    others = [_uniforms(seed=8), _uniforms(rollout=1), _uniforms(attempt=1), _uniforms(index=np.arange(1, 17))]
    for other in others:
        assert not np.any(base == other)


def test_constant_logits_give_many_different_tokens():
    token, _ = sample(jnp.zeros((16, 1000)), _uniforms(), jnp.ones(16))
    assert len(set(np.asarray(token).tolist())) >= 10


@pytest.mark.parametrize(
    ("pieces", "stop", "kept"),
    [
        (["x", "</", "a", ">!", "zz"], ["</a>"], 4),
        (["x", "</", "a", ">!", "zz"], ["</b>"], 5),
        (["x", "y"], [], 2),
        ([], ["."], 0),
        (["a.b", "c"], ["."], 1),
        (["ab", "", "c", "d"], ["bc", "d"], 3),
    ],
)
def test_text_is_cut_after_the_token_that_completes_a_stop_string(pieces, stop, kept):
    assert cut_at_stop(pieces, stop) == kept


@given(st.lists(st.text("ab", max_size=3), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
def test_cut_is_the_shortest_prefix_that_contains_a_stop_string(pieces, stop):
    found = [n for n in range(1, len(pieces) + 1) if any(s in "".join(pieces[:n]) for s in stop)]
    assert cut_at_stop(pieces, stop) == (found[0] if found else len(pieces))


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        cut_at_stop(["a"], [""])
