"""The forms of causal attention agree with each other and with a loop over positions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import value_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.models import attention as attn


def inputs(B, T, H, K, E, *, dtype=jnp.float32, scale=1.0):
    rng = np.random.default_rng(B * T + H)
    shapes = [(B, T, H, E), (B, T, K, E), (B, T, K, E), (B, T, H, E)]
    q, k, v, d = (rng.normal(size=shape) for shape in shapes)
    return tuple(np.asarray(x, dtype) for x in (q * scale, k * scale, v * scale, d))


def looped(q, k, v):
    """Position by position, head by head, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, H, E = q.shape
    group = H // k.shape[2]
    out = np.zeros((B, T, H, E))
    for b, t, h in np.ndindex(B, T, H):
        scores = k[b, : t + 1, h // group] @ q[b, t, h] / np.sqrt(E)
        weights = np.exp(scores - scores.max())
        out[b, t, h] = weights / weights.sum() @ v[b, : t + 1, h // group]
    return out


@pytest.mark.parametrize("form", [attn.causal_attention, attn.blockwise_causal_attention, attn.attention])
def test_output_equals_a_loop_over_positions(form):
    q, k, v, _ = inputs(2, 70, 4, 2, 8)
    np.testing.assert_allclose(jax.jit(form)(q, k, v), looped(q, k, v), atol=2e-6)


@pytest.mark.parametrize(
    ("T", "H", "K"),
    [
        pytest.param(1, 4, 2, id="one position"),
        pytest.param(7, 4, 2, id="shorter than a block"),
        pytest.param(65, 6, 2, id="two unequal blocks"),
        pytest.param(64, 3, 3, id="no groups"),
        pytest.param(300, 4, 1, id="not divisible, one kv head"),
    ],
)
def test_values_and_gradients_agree_between_forms(T, H, K):
    data = inputs(2, T, H, K, 8)
    reference = value_and_gradients(attn.causal_attention, *data)
    for form in (attn.blockwise_causal_attention, attn.fused_causal_attention):
        for got, want in zip(value_and_gradients(form, *data), reference, strict=True):
            np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5)


def test_bfloat16_forms_stay_within_its_precision_of_float32():
    data = inputs(2, 70, 4, 2, 16, dtype=jnp.bfloat16)
    reference = value_and_gradients(attn.causal_attention, *(x.astype(np.float32) for x in data))
    for form in (attn.causal_attention, attn.blockwise_causal_attention, attn.fused_causal_attention):
        assert jax.eval_shape(form, *data[:3]).dtype == jnp.bfloat16
        for got, want in zip(value_and_gradients(form, *data), reference, strict=True):
            assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


def test_large_scores_neither_overflow_nor_lose_the_gradient():
    data = inputs(1, 40, 2, 1, 8, scale=50.0)
    reference = value_and_gradients(attn.causal_attention, *data)
    for got, want in zip(value_and_gradients(attn.blockwise_causal_attention, *data), reference, strict=True):
        assert np.isfinite(got).all()
        # Products of two arrays of size 50 cancel in the gradient: the error is relative to them.
        np.testing.assert_allclose(got, want, atol=1e-5 * 50**2)


def test_group_of_heads_reads_its_own_kv_head():
    q, k, v, _ = inputs(1, 5, 4, 2, 4)
    run = jax.jit(attn.blockwise_causal_attention)
    out, changed = run(q, k, v), run(q, k, v + np.array([0.0, 1.0])[:, None])
    np.testing.assert_array_equal(out[:, :, :2], changed[:, :, :2])
    np.testing.assert_allclose(out[:, :, 2:] + 1.0, changed[:, :, 2:], atol=1e-6)


def test_gradients_on_a_mesh_equal_those_of_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data = inputs(8, 33, 4, 2, 8)
    rows = jax.P("data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=rows)
    def sharded(q, k, v, d):
        return jax.vjp(attn.blockwise_causal_attention, q, k, v)[1](d)

    for got, want in zip(
        jax.jit(sharded)(*data), value_and_gradients(attn.blockwise_causal_attention, *data)[1:], strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_choice_follows_the_backend(monkeypatch):
    used = []
    monkeypatch.setattr(attn, "blockwise_causal_attention", lambda *a: used.append("blockwise"))
    monkeypatch.setattr(attn, "fused_causal_attention", lambda *a: used.append("fused"))
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda name=backend: name)
        attn.attention(*inputs(1, 8, 2, 1, 8)[:3])
    assert used == ["blockwise", "fused"]


@given(st.integers(1, 20_000))
@settings(max_examples=200, deadline=None)
def test_blocks_cover_every_position_once_and_stay_few(T):
    blocks = attn._blocks(T)
    assert blocks[0][0] == 0
    assert blocks[-1][1] == T
    assert all(a[1] == b[0] for a, b in itertools.pairwise(blocks))
    assert all(start < end for start, end in blocks)
    assert len(blocks) <= attn.MAX_BLOCKS
