import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models import decoding
from sao_jax.models.config import ModelConfig
from sao_jax.models.decoder import bind, init_params, rotary_angles

CONFIG = ModelConfig(vocab_size=11, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, jax.random.key(0))


@functools.partial(jax.jit, static_argnames="attended")
def extend(params, cache, slots, tokens, start, attended=16):
    return decoding.extend(bind(CONFIG, params), cache, slots, tokens, start, attended=attended)


@functools.partial(jax.jit, static_argnames="attended")
def burst(params, cache, tokens_NxB, past, attended=16):
    """Feeds given tokens as one burst; returns (hidden [N, B, D], cache)."""
    steps = tokens_NxB.shape[0]
    model = bind(CONFIG, params)
    window = decoding.open_window(cache, past, attended=attended, steps=steps)
    hidden = []
    for i in range(steps):
        cos, sin = (t[:, None] for t in rotary_angles(past + i, CONFIG.head_dim, CONFIG.rope_theta))
        h, window = decoding.decode_step(model, window, tokens_NxB[i], cos, sin, past, i, steps=steps)
        hidden.append(h)
    return jnp.stack(hidden), decoding.close_window(cache, window, past, steps=steps)


@jax.jit
def full(params, tokens):
    return bind(CONFIG, params)(tokens)


def test_chunks_and_steps_reproduce_the_full_forward_pass(params):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 11, (3, 15)).astype(np.int32)
    want = full(params, tokens)
    cache = decoding.init_cache(CONFIG, 4, 24)
    slots = np.array([2, 0, 3])
    length = np.array([5, 4, 2])  # true lengths of the first chunk; the rest of it is padding
    padded = np.where(np.arange(5) < length[:, None], tokens[:, :5], 0)
    hidden, cache = extend(params, cache, slots, padded, np.zeros(3, np.int32))
    for p in range(3):
        np.testing.assert_allclose(hidden[p, : length[p]], want[p, : length[p]], atol=1e-5)
    # A second chunk of three tokens, each row from its own position.
    chunk = np.stack([tokens[p, n : n + 3] for p, n in enumerate(length)])
    hidden, cache = extend(params, cache, slots, chunk, length)
    for p, n in enumerate(length):
        np.testing.assert_allclose(hidden[p], want[p, n : n + 3], atol=1e-5)
    # Then two bursts of three steps over all slots; slot 1 holds nothing.
    for first in (3, 6):
        past, feed = np.zeros(4, np.int32), np.zeros((3, 4), np.int32)
        past[slots] = length + first
        feed[:, slots] = np.stack([tokens[p, n + first : n + first + 3] for p, n in enumerate(length)], 1)
        hidden, cache = burst(params, cache, feed, past)
        for p, n in enumerate(length):
            np.testing.assert_allclose(hidden[:, slots[p]], want[p, n + first : n + first + 3], atol=1e-5)


def test_what_an_earlier_sequence_left_in_a_slot_does_not_matter(params):
    tokens = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
    clean = decoding.init_cache(CONFIG, 2, 24)
    dirty = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), clean)
    results = []
    for cache in (clean, dirty):
        first, cache = extend(params, cache, np.arange(2), tokens, np.zeros(2, np.int32))
        second, cache = extend(params, cache, np.arange(2), tokens, np.full(2, 4, np.int32))
        third, _ = burst(params, cache, tokens.T, np.full(2, 8, np.int32))
        results.append((first, second, third))
    for a, b in zip(*results, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)


def test_attended_length_slot_and_mates_change_no_bit_of_a_chunk(params):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        past, start = rng.integers(0, 11, (2, 32)), rng.integers(1, 32)
        chunk = rng.integers(0, 11, (3, 4))

        def run(slots, mates, attended, past=past, start=start, chunk=chunk):
            cache = decoding.init_cache(CONFIG, 4, 80)
            _, cache = extend(params, cache, np.array(slots), past[[0, mates]], np.zeros(2, np.int32), attended=32)
            tokens = chunk[[0, 1 + mates]]
            return extend(params, cache, np.array(slots), tokens, np.full(2, start), attended=attended)[0][0]

        want = run((0, 1), 0, 32)
        np.testing.assert_array_equal(want, run((3, 2), 1, 32))
        np.testing.assert_array_equal(want, run((1, 0), 1, 64))


def test_attended_length_changes_no_bit_of_a_burst(params):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        cache = jax.tree.map(
            lambda x, rng=rng: rng.normal(size=x.shape).astype(np.float32), decoding.init_cache(CONFIG, 4, 80)
        )
        feed, past = rng.integers(0, 11, (3, 4)), rng.integers(0, 17, 4)
        np.testing.assert_array_equal(burst(params, cache, feed, past, 32)[0], burst(params, cache, feed, past, 64)[0])


def test_repeating_a_row_of_a_prefill_call_is_harmless(params):
    cache = decoding.init_cache(CONFIG, 2, 24)
    tokens = np.array([[1, 2, 3, 4]] * 2, np.int32)
    hidden, cache = extend(params, cache, np.array([1, 1]), tokens, np.zeros(2, np.int32))
    np.testing.assert_array_equal(hidden[0], hidden[1])
    assert not np.any(cache[0][0][0])
