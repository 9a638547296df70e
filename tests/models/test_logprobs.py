"""Scoring given tokens: temperature, precision, alignment, packing, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.models.logprobs import next_token_logprobs, token_logprobs

scored = jax.jit(token_logprobs, static_argnames="chunk")
next_scored = jax.jit(next_token_logprobs)


def score_logits(logits, targets, temperature=1.0, **kwargs):
    """Scores rows of logits as they are: the hidden states are the logits and the head is the identity."""
    logits = jnp.asarray(logits)
    head = jnp.eye(logits.shape[-1], dtype=logits.dtype)
    return scored(logits, head, jnp.asarray(targets), temperature, **kwargs)


def reference(logits, targets, temperature):
    """Row by row in float64."""
    logp, entropy = [], []
    for row, target, t in zip(np.asarray(logits, np.float64), targets, temperature, strict=True):
        scaled = row / t
        log_p = scaled - scaled.max()
        log_p = log_p - np.log(np.exp(log_p).sum())
        logp.append(log_p[target])
        entropy.append(-(np.exp(log_p) * log_p).sum())
    return np.array(logp), np.array(entropy)


def test_temperature_divides_the_logits():
    logp, _ = score_logits([[2.0, 1.0, 0.0]], [1], jnp.array([0.5]))
    np.testing.assert_allclose(logp, [-2.14293163], atol=1e-6)
    # Dividing the log-prob instead would give twice the value at temperature 1.
    assert abs(float(logp[0]) - 2 * float(score_logits([[2.0, 1.0, 0.0]], [1])[0][0])) > 0.5


def test_bfloat16_logits_are_scored_in_float32():
    logits = jnp.zeros((1, 1000), jnp.bfloat16).at[0, 7].set(-5)
    logp, entropy = score_logits(logits, [7])
    assert logp.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logp, [-11.906762], atol=1e-3)


def test_product_with_a_bfloat16_hidden_state_accumulates_in_float32():
    hidden = jnp.ones((1, 512), jnp.bfloat16)
    head = jnp.full((512, 2), 1 / 512).at[0, 1].add(1 / 128)
    # Logits 1 and 1 + 1/128: the difference is below the spacing of bfloat16 at 1... and is kept.
    logp, _ = scored(hidden, head, jnp.array([1]), 1.0)
    np.testing.assert_allclose(logp, [-np.log1p(np.exp(-1 / 128))], atol=2e-5)


@given(st.integers(0, 10_000), st.sampled_from([None, 1, 3, 5, 64]), st.floats(0.1, 4.0))
@settings(max_examples=15, deadline=None)
def test_values_equal_a_loop_whatever_the_chunk(seed, chunk, spread):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(7, 11)) * spread * 5).astype(np.float32)
    targets, temperature = rng.integers(0, 11, 7), rng.uniform(0.2, 3.0, 7).astype(np.float32)
    logp, entropy = score_logits(logits, targets, temperature, chunk=chunk)
    want_logp, want_entropy = reference(logits, targets, temperature)
    np.testing.assert_allclose(logp, want_logp, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, want_entropy, rtol=1e-5, atol=2e-5)


def gradients(chunk, temperature=None, scale=1.0):
    keys = jax.random.split(jax.random.key(3), 4)
    hidden, head = jax.random.normal(keys[0], (10, 6)) * scale, jax.random.normal(keys[1], (6, 13))
    targets, weights = jax.random.randint(keys[2], (10,), 0, 13), jax.random.normal(keys[3], (2, 10))
    temperature = jnp.linspace(0.5, 2.0, 10) if temperature is None else jnp.full(10, temperature)

    def loss(hidden, head):
        logp, entropy = token_logprobs(hidden, head, targets, temperature, chunk=chunk)
        return (weights[0] * logp + weights[1] * entropy).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, head)


def test_chunked_gradients_equal_whole_ones():
    whole = gradients(None)
    for chunk in (1, 4):
        for got, want in zip(gradients(chunk), whole, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6)


def test_logprob_gradient_is_onehot_minus_probability():
    logits = jnp.array([[2.0, 1.0, 0.0]])
    got = jax.grad(lambda x: score_logits(x, [1], 0.5)[0].sum())(logits)
    p = np.exp([4.0, 2.0, 0.0]) / np.exp([4.0, 2.0, 0.0]).sum()
    np.testing.assert_allclose(got[0], (np.array([0, 1, 0]) - p) / 0.5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-4, 1e4])
def test_extreme_temperatures_give_finite_gradients(temperature):
    for gradient in gradients(4, temperature, scale=30.0):
        assert bool(jnp.isfinite(gradient).all())


def test_large_vocabulary_never_holds_all_logits():
    N, D, V = 512, 16, 50_000
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((N, D), (D, V))]

    def temp_bytes(chunk):
        def loss(hidden, head):
            logp, entropy = token_logprobs(hidden, head, jnp.zeros(N, jnp.int32), 1.0, chunk=chunk)
            return logp.sum() + 0.1 * entropy.sum()

        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    all_logits = 4 * N * V
    assert temp_bytes(N) >= all_logits
    assert temp_bytes(None) < 0.6 * all_logits
    assert temp_bytes(16) < 0.15 * all_logits


def test_chunk_below_one_is_an_error():
    with pytest.raises(ValueError, match="chunk is 0"):
        score_logits([[1.0, 2.0]], [0], chunk=0)


def test_token_is_scored_by_the_logits_before_it():
    tokens = np.array([3, 1, 2, 0])
    logits = np.zeros((1, 4, 4), np.float32)
    logits[0, np.arange(3), tokens[1:]] = 2.0
    logp, _ = next_scored(logits, jnp.eye(4), tokens[None], jnp.ones(1))
    np.testing.assert_allclose(logp, [[0.0, -0.34075295, -0.34075295, -0.34075295]], atol=1e-6)


def test_entropy_is_aligned_with_the_token_it_belongs_to():
    # Two-way distributions whose entropies, at positions 0..5, are those of p = 0.5, 0.6, ...
    p = np.array([0.5, 0.6, 0.7, 0.8, 0.9, 0.55])
    logits = np.stack([np.log(p), np.log(1 - p)], axis=-1)[None].astype(np.float32)
    _, entropy = next_scored(logits, jnp.eye(2), np.zeros((1, 6), np.int32), jnp.ones(1))
    at_position = -(p * np.log(p) + (1 - p) * np.log(1 - p))
    mask = np.array([0, 0, 0, 1, 1, 1], bool)
    np.testing.assert_allclose(entropy[0][mask], at_position[[2, 3, 4]], atol=1e-6)
    assert entropy[0, 0] == 0


def test_pairs_across_packed_trajectories_are_not_scored():
    tokens, packs = np.array([[5, 6, 2, 7, 2]]), np.array([[1, 1, 1, 2, 2]])
    keys = jax.random.split(jax.random.key(0), 2)
    hidden, head = jax.random.normal(keys[0], (1, 5, 4)), jax.random.normal(keys[1], (4, 8))

    def score(hidden):
        return next_scored(hidden, head, tokens, jnp.ones(1), pack_ids_BxT=packs)

    logp, entropy = score(hidden)
    scored_pairs = [[t - 1, t] for t in range(5) if logp[0, t] != 0]
    assert scored_pairs == [[0, 1], [1, 2], [3, 4]]
    assert entropy[0, 3] == 0
    np.testing.assert_array_equal(logp != 0, entropy != 0)
    # Each pack alone gives the same numbers, and the last position of a pack has no gradient.
    alone = next_scored(hidden[:, 3:], head, tokens[:, 3:], jnp.ones(1))
    np.testing.assert_allclose(logp[:, 3:], alone[0], atol=1e-6)
    gradient = jax.jit(jax.grad(lambda h: sum(x.sum() for x in score(h))))(hidden)
    np.testing.assert_array_equal(np.abs(gradient[0]).sum(-1) > 0, [True, True, False, True, False])


def test_rows_keep_their_own_temperature():
    hidden = jax.random.normal(jax.random.key(1), (3, 4, 5))
    tokens = np.array([[0, 1, 2, 3]] * 3)
    temperature = jnp.array([0.5, 1.0, 2.0])
    logp, entropy = next_scored(hidden, jnp.eye(5), tokens, temperature)
    for row in range(3):
        want = reference(hidden[row, :3], tokens[row, 1:], [float(temperature[row])] * 3)
        np.testing.assert_allclose((logp[row, 1:], entropy[row, 1:]), want, atol=1e-5)


@given(st.integers(0, 10_000), st.sampled_from([None, 1, 3, 5, 64]), st.floats(0.0, 1.0))
@settings(max_examples=15, deadline=None)
def test_live_tokens_have_the_same_scores_and_gradients(seed, chunk, share):
    rng = np.random.default_rng(seed)
    hidden, head = rng.normal(size=(11, 4)).astype(np.float32), rng.normal(size=(4, 7)).astype(np.float32)
    targets, live = rng.integers(0, 7, 11), jnp.asarray(rng.random(11) < share)

    def loss(hidden, head, live):
        logp, entropy = scored(hidden, head, targets, 0.7, chunk=chunk, live_N=live)
        return jnp.where(asked, logp + 0.3 * entropy, 0.0).sum()

    asked = live
    found = jax.value_and_grad(loss, (0, 1))(hidden, head, live)
    expected = jax.value_and_grad(loss, (0, 1))(hidden, head, None)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_chunks_without_a_live_token_are_not_computed():
    """Whatever is in them reaches neither values nor gradients, not even by a factor of zero."""
    live = jnp.arange(12) % 3 == 0
    hidden = jnp.where(live[:, None], jnp.ones((12, 3)), jnp.nan)

    def loss(head):
        logp, _ = scored(hidden, head, jnp.zeros(12, int), 1.0, chunk=4, live_N=live)
        return logp.sum()

    value, gradient = jax.value_and_grad(loss)(jnp.eye(3))
    np.testing.assert_allclose(value, 4 * np.log(1 / 3), atol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(("vocabulary", "skips"), [(1024, True), (1023, False)])
def test_with_a_large_vocabulary_the_cost_follows_the_live_tokens(vocabulary, skips):
    """Chunks that hold live tokens alone are scored: a NaN elsewhere is seen only if all are."""
    live = jnp.arange(1024) % 8 == 3
    hidden = jnp.where(live[:, None], 1.0, jnp.nan)
    head = jnp.zeros((1, vocabulary))

    def loss(head):
        logp, _ = token_logprobs(hidden, head, jnp.zeros(1024, int), 1.0, live_N=live)
        return jnp.where(live, logp, 0.0).sum()

    value, gradient = jax.value_and_grad(loss)(head)
    np.testing.assert_allclose(value, -128 * np.log(vocabulary), rtol=1e-5)
    assert bool(np.isfinite(gradient).all()) == skips


def test_entries_of_other_tokens_are_zero():
    tokens, live = jnp.arange(6)[None] % 3, jnp.array([[False, True, False, True, True, False]])
    hidden = jax.random.normal(jax.random.key(0), (1, 6, 3))
    logp, entropy = next_scored(hidden, jnp.eye(3), tokens, 1.0, live_BxT=live)
    whole, _ = next_scored(hidden, jnp.eye(3), tokens, 1.0)
    np.testing.assert_allclose(logp, np.where(live, whole, 0.0), atol=1e-6)
    assert (np.asarray(entropy) == 0)[~np.asarray(live)].all()
