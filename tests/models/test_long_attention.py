"""Attention in blocks of queries and keys, on one device and around a ring of them: the same numbers, less memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_compile, value_and_gradients  # noqa: F401

from sao_jax.models import attention as attn
from sao_jax.models import long_attention as long
from sao_jax.models.compute import Compute
from sao_jax.models.config import ModelConfig
from sao_jax.models.decoder import bind, init_params, pack_positions
from sao_jax.models.logprobs import next_token_logprobs

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = ModelConfig(vocab_size=17, dim=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=16)
SEQ = jax.P(None, "seq")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(long, "BLOCK", 16)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))


def inputs(T, H=4, K=2, *, B=2, E=8, dtype=np.float32, scale=1.0):
    rng = np.random.default_rng(T + H)
    q, k, v, d = (rng.normal(size=(B, T, heads, E)) for heads in (H, K, K, H))
    return tuple(np.asarray(x, dtype) for x in (q * scale, k * scale, v * scale, d))


def ids_of(T):
    """Rows of one long and some short packs; the seams of the two rows differ, and one block holds three packs."""
    seams = np.array([[T // 2, T // 2 + 3, T - 4], [3, 5, T - T // 4]])
    return (np.arange(T) >= seams[:, :, None]).sum(1).astype(np.int32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("T", "H", "K"),
    [
        pytest.param(9, 4, 2, id="one block"),
        pytest.param(70, 6, 2, id="blocks with padding"),
        pytest.param(64, 3, 3, id="whole blocks, no groups"),
        pytest.param(120, 4, 1, id="one kv head"),
    ],
)
def test_streamed_equals_the_definition(T, H, K, packed):
    data, ids = inputs(T, H, K), ids_of(T) if packed else None
    want = value_and_gradients(lambda q, k, v: attn.causal_attention(q, k, v, ids), *data)
    got = value_and_gradients(lambda q, k, v: long.streamed_causal_attention(q, k, v, ids), *data)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-5)


def test_streamed_stays_in_bfloat16_and_within_its_precision():
    data = inputs(70, dtype=jnp.bfloat16)
    want = value_and_gradients(attn.causal_attention, *(x.astype(np.float32) for x in data))
    assert jax.eval_shape(long.streamed_causal_attention, *data[:3]).dtype == jnp.bfloat16
    for got, exact in zip(value_and_gradients(long.streamed_causal_attention, *data), want, strict=True):
        assert np.abs(got - exact).max() < 0.02 * np.abs(exact).max()


def test_large_scores_neither_overflow_nor_lose_the_gradient():
    data = inputs(40, scale=50.0)
    want = value_and_gradients(attn.causal_attention, *data)
    for got, exact in zip(value_and_gradients(long.streamed_causal_attention, *data), want, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, exact, atol=1e-5 * 50**2)


def test_blocks_that_hold_earlier_packs_only_are_never_read():
    """0 * NaN is NaN: keys that were multiplied by weight 0 would show."""
    q, k, v, d = inputs(64, B=1)
    ids = (np.arange(64) >= 32).astype(np.int32)[None]
    k[:, :32] = v[:, :32] = np.nan
    form = functools.partial(long.streamed_causal_attention, pack_ids_BxT=ids)
    for got in value_and_gradients(form, q, k, v, d):
        assert np.isfinite(got[:, 32:]).all()


def temp_bytes(form, T):
    x = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)
    gradient = jax.grad(lambda q, k, v: form(q, k, v).sum(), argnums=(0, 1, 2))
    return jax.jit(gradient).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_length_not_with_its_square(monkeypatch):
    monkeypatch.setattr(long, "BLOCK", 64)
    assert temp_bytes(long.streamed_causal_attention, 4096) < 4.5 * temp_bytes(long.streamed_causal_attention, 1024)
    assert temp_bytes(attn.blockwise_causal_attention, 2048) > 3 * temp_bytes(attn.blockwise_causal_attention, 1024)
    one_square = 4096**2 * 4
    assert temp_bytes(long.streamed_causal_attention, 4096) < one_square / 16


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_long_rows_use_the_form_that_holds_no_square(monkeypatch, backend):
    used = []
    for name in ("blockwise_causal_attention", "fused_causal_attention", "streamed_causal_attention"):
        monkeypatch.setattr(attn, name, lambda *a, name=name: used.append(name.split("_")[0]))
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    short = "blockwise" if backend == "cpu" else "fused"
    for dtype, packed, T in [
        (jnp.float32, False, attn.LONG),
        (jnp.float32, False, attn.LONG + 1),
        (jnp.bfloat16, False, attn.LONG + 1),
        (jnp.bfloat16, True, attn.LONG + 1),
    ]:
        x = jax.ShapeDtypeStruct((1, T, 2, 8), dtype)
        attn.attention(x, x, x, jax.ShapeDtypeStruct((1, T), jnp.int32) if packed else None)
    # cuDNN's kernel takes 16-bit rows of any length, but not packs.
    assert used == [short, "streamed", "streamed" if backend == "cpu" else "fused", "streamed"]


# -- rows cut over devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("T", [pytest.param(8 * 20, id="blocks with padding"), pytest.param(8, id="one token each")])
def test_ring_equals_the_definition(mesh, T, packed, check_vma):
    data, ids = inputs(T), ids_of(T) if packed else np.zeros((2, T), np.int32)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=SEQ, out_specs=SEQ, check_vma=check_vma)
    def ring(q, k, v, d, ids):
        form = functools.partial(long.ring_attention, pack_ids_BxT=ids if packed else None, axis_name="seq")
        out, pullback = jax.vjp(form, q, k, v)
        return out, *pullback(d)

    want = value_and_gradients(lambda q, k, v: attn.causal_attention(q, k, v, ids), *data)
    for got, exact in zip(jax.jit(ring)(*data, ids), want, strict=True):
        np.testing.assert_allclose(got, exact, atol=2e-5, rtol=1e-5)


def test_positions_of_packs_continue_over_the_seams_of_devices(mesh):
    ids = ids_of(64)
    cut = jax.shard_map(lambda i: pack_positions(i, "seq"), mesh=mesh, in_specs=SEQ, out_specs=SEQ)
    np.testing.assert_array_equal(jax.jit(cut)(ids), pack_positions(ids))


@pytest.mark.parametrize(
    ("packed", "compute"),
    [
        pytest.param(False, {}, id="plain"),
        pytest.param(True, {}, id="packed"),
        pytest.param(True, {"remat": "block", "scan_layers": True}, id="packed, recomputed, scanned"),
    ],
)
def test_decoder_on_cut_rows_equals_that_on_whole_ones(mesh, packed, compute):
    T = 8 * 20
    params = jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(0))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, MODEL.vocab_size, (2, T)).astype(np.int32)
    weight = rng.normal(size=(2, T, MODEL.dim)).astype(np.float32)
    ids = ids_of(T) if packed else np.zeros((2, T), np.int32)

    def part(params, tokens, weight, ids, compute):
        hidden = bind(MODEL, params)(tokens, pack_ids=ids if packed else None, compute=compute)
        return (hidden * weight).sum(), hidden

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(jax.P(), SEQ, SEQ, SEQ), out_specs=(jax.P(), SEQ))
    def cut(params, tokens, weight, ids):
        loss, hidden = part(params, tokens, weight, ids, Compute(sequence_axis="seq", **compute))
        return jax.lax.psum(loss, "seq"), hidden

    whole = functools.partial(part, compute=Compute())
    results = [jax.jit(jax.value_and_grad(f, has_aux=True))(params, tokens, weight, ids) for f in (cut, whole)]
    ((loss, hidden), gradient), ((want_loss, want_hidden), want_gradient) = results
    np.testing.assert_allclose(hidden, want_hidden, atol=1e-5)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-4, atol=1e-3)
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(want_gradient), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T", [8 * 3, 8])
def test_scores_of_cut_rows_are_those_of_whole_ones(mesh, T, packed):
    """The first token of a device is predicted by the last of the one before."""
    rng = np.random.default_rng(2)
    hidden, head = rng.normal(size=(2, T, 5)).astype(np.float32), rng.normal(size=(5, 7)).astype(np.float32)
    tokens, live = rng.integers(0, 7, (2, T)), rng.random((2, T)) < 0.7
    ids, temperature = ids_of(T), rng.uniform(0.5, 2.0, (2, T)).astype(np.float32)
    weight = rng.normal(size=(2, T)).astype(np.float32)

    def part(hidden, head, tokens, live, ids, temperature, weight, axis=None):
        packs = dict(pack_ids_BxT=ids) if packed else {}
        logp, entropy = next_token_logprobs(
            hidden, head, tokens, temperature, live_BxT=live, sequence_axis=axis, **packs
        )
        return (weight * (logp + entropy)).sum(), (logp, entropy)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(SEQ, jax.P(), *(SEQ,) * 5), out_specs=(jax.P(), SEQ))
    def cut(*arguments):
        loss, scores = part(*arguments, axis="seq")
        return jax.lax.psum(loss, "seq"), scores

    arguments = hidden, head, tokens, live, ids, temperature, weight
    got, want = (jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(*arguments) for f in (cut, part))
    assert np.abs(want[0][1][0]).sum() > 1
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)
