import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.models import compressor
from sao_jax.models.compressor import Code, CompressorConfig
from tests.helpers import quick_compile  # noqa: F401

TINY = CompressorConfig(width_in=6, width=2, experts=3, top_k=2)


def rows(seed, count=8, width=6):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, width)), jnp.float32)


def module(config=TINY, seed=0):
    params = compressor.init_params(config, jax.random.key(seed))
    return params, compressor.bind(config, params)


def test_a_router_worked_by_hand():
    config = CompressorConfig(width_in=2, width=1, experts=2, top_k=1)
    params = {
        "router": jnp.array([[jnp.log(3.0), 0.0], [0.0, 0.0]]),
        "router_bias": jnp.zeros(2),
        "encode_w": jnp.array([[[1.0], [0.0]], [[0.0], [2.0]]]),
        "encode_b": jnp.array([[0.5], [0.0]]),
        "decode_w": jnp.array([[[1.0, 0.0]], [[0.0, 0.5]]]),
        "decode_b": jnp.array([[0.0, 7.0], [9.0, 0.0]]),
    }
    x = jnp.array([[1.0, 4.0], [-1.0, 4.0]])
    decoded, code, probs = compressor.bind(config, params)(x)
    np.testing.assert_allclose(probs, [[0.75, 0.25], [0.25, 0.75]], rtol=1e-6)
    np.testing.assert_array_equal(code.experts, [[0], [1]])
    np.testing.assert_allclose(code.gates, [[1.0], [1.0]], rtol=1e-6)
    np.testing.assert_allclose(code.latent, [[1.5], [8.0]], rtol=1e-6)
    np.testing.assert_allclose(decoded, [[1.5, 7.0], [9.0, 4.0]], rtol=1e-6)


def test_two_of_three_experts_match_a_loop():
    params, model = module()
    x = rows(1)
    decoded, code, _ = model(x)
    p = jax.tree.map(np.asarray, params)
    for n in range(len(x)):
        logits = np.asarray(x[n]) @ p["router"] + p["router_bias"]
        probs = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-probs)[:2]
        gates = probs[best] / probs[best].sum()
        z = sum(g * (np.asarray(x[n]) @ p["encode_w"][e] + p["encode_b"][e]) for g, e in zip(gates, best, strict=True))
        y = sum(g * (z @ p["decode_w"][e] + p["decode_b"][e]) for g, e in zip(gates, best, strict=True))
        np.testing.assert_array_equal(code.experts[n], best)
        np.testing.assert_allclose(code.latent[n], z, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(decoded[n], y, rtol=2e-5, atol=1e-6)


def test_one_expert_is_a_linear_projection_with_a_decoder():
    config = CompressorConfig(6, 2, 1, 1)
    params, model = module(config)
    x = rows(2)
    linear = (x @ params["encode_w"][0] + params["encode_b"][0]) @ params["decode_w"][0] + params["decode_b"][0]
    np.testing.assert_allclose(model(x)[0], linear, rtol=1e-5, atol=1e-6)


def test_equal_experts_are_one_expert_whatever_the_router_says():
    params, _ = module()
    same = {k: jnp.broadcast_to(v[:1], v.shape) if "code" in k else v for k, v in params.items()}
    one = {k: v[:1] if "code" in k else v[..., :1] for k, v in params.items()}
    x = rows(3)
    single = compressor.bind(CompressorConfig(6, 2, 1, 1), one)
    np.testing.assert_allclose(compressor.bind(TINY, same)(x)[0], single(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (3, 1), (3, 2)])
def test_a_compact_code_decodes_alike_and_has_the_stated_bytes(experts, top_k):
    config = CompressorConfig(6, 2, experts, top_k)
    _, model = module(config)
    code, _ = model.encode(rows(4))
    compact = model.compact(code)
    np.testing.assert_array_equal(model.decode(compact), model.decode(code))
    assert sum(x.nbytes for x in compact) == 8 * config.code_bytes


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_a_row_is_compressed_alike_wherever_it_stands(seed):
    _, model = module()
    x = rows(seed)
    order = np.random.default_rng(seed).permutation(len(x))
    np.testing.assert_allclose(model(x[order])[0], model(x)[0][order], rtol=1e-5, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_the_balance_is_one_where_either_side_is_uniform(seed):
    rng = np.random.default_rng(seed)
    probs = jnp.asarray(rng.dirichlet(np.ones(4), 8), jnp.float32)
    mask = jnp.ones(8, bool)
    total, count = compressor.balance_loss(jnp.full((8, 4), 0.25), jnp.asarray(rng.integers(0, 4, (8, 1))), mask)
    np.testing.assert_allclose(total / count, 1.0, rtol=1e-5)
    total, count = compressor.balance_loss(probs, jnp.arange(8)[:, None] % 4, mask)
    np.testing.assert_allclose(total / count, 1.0, rtol=1e-5)


def test_the_balance_of_a_collapsed_router_is_the_number_of_experts():
    probs = jnp.zeros((8, 4)).at[:, 2].set(1.0)
    total, count = compressor.balance_loss(probs, jnp.full((8, 1), 2), jnp.ones(8, bool))
    assert total / count == 4.0


def test_the_balance_by_hand():
    probs = jnp.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.0, 0.0]])
    experts = jnp.array([[0], [0], [1], [1]])
    total, count = compressor.balance_loss(probs, experts, jnp.array([True, True, True, False]))
    # f = (2/3, 1/3), P = (1.7/3, 1.3/3)
    np.testing.assert_allclose(total / count, 2 * (2 / 3 * 1.7 / 3 + 1 / 3 * 1.3 / 3), rtol=1e-6)


def test_rows_that_are_not_live_change_no_loss_and_no_gradient():
    params, _ = module()
    mask = jnp.arange(8) < 5

    def loss(params, x):
        decoded, code, probs = compressor.bind(TINY, params)(x)
        a = compressor.reconstruction_loss(x, decoded, mask)
        b = compressor.balance_loss(probs, code.experts, mask)
        return a[0] / a[1] + b[0] / b[1]

    x = rows(5)
    other = jnp.where(mask[:, None], x, 100.0)
    for a, b in zip(jax.tree.leaves(jax.value_and_grad(loss)(params, x)),
                    jax.tree.leaves(jax.value_and_grad(loss)(params, other)), strict=True):  # fmt: skip
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_reconstruction_alone_teaches_the_router(top_k):
    config = dataclasses.replace(TINY, top_k=top_k)
    params, _ = module(config)
    x, live = rows(6), jnp.ones(8, bool)

    def loss(params):
        return compressor.reconstruction_loss(x, compressor.bind(config, params)(x)[0], live)[0]

    assert float(jnp.abs(jax.grad(loss)(params)["router"]).max()) > 1e-4


def test_pca_has_the_error_of_the_dropped_eigenvalues_and_truncation_of_the_dropped_columns():
    config = CompressorConfig(6, 2, 1, 1)
    x = rows(7, count=50) * jnp.array([1.0, 2.0, 3.0, 0.5, 4.0, 1.0]) + 5.0
    live = jnp.ones(50, bool)

    def error(params):
        total, count = compressor.reconstruction_loss(x, compressor.bind(config, params)(x)[0], live)
        return float(total / count)

    dropped = np.linalg.eigvalsh(np.cov(np.asarray(x).T, bias=True))[:4].sum() / 6
    np.testing.assert_allclose(error(compressor.pca_params(config, x)), dropped, rtol=1e-3)
    cut = float((x[:, 2:] ** 2).sum(1).mean() / 6)
    np.testing.assert_allclose(error(compressor.truncation_params(config)), cut, rtol=1e-5)


def test_a_mixture_finds_planes_that_no_single_projection_holds():
    rng = np.random.default_rng(8)
    planes = [np.linalg.qr(rng.normal(size=(6, 2)))[0] for _ in range(3)]
    x = jnp.asarray(
        np.concatenate([10 * rng.normal(size=6) + rng.normal(size=(40, 2)) @ plane.T for plane in planes]), jnp.float32
    )
    config = CompressorConfig(6, 2, 3, 1)
    live = jnp.ones(len(x), bool)

    def error(kind):
        c = compressor.config_of(kind, config)
        params = compressor.start_params(kind, c, jax.random.key(1), x)
        return float(compressor.reconstruction_loss(x, compressor.bind(c, params)(x)[0], live)[0] / len(x))

    assert error("moe") < 1e-3 < 0.05 < error("pca")


def test_sizes_that_cannot_be_are_refused():
    for sizes, word in (((4, 5, 1, 1), "width 5"), ((4, 2, 1, 2), "top_k 2"), ((4, 0, 1, 1), "at least 1")):
        with pytest.raises(ValueError, match=word):
            CompressorConfig(*sizes)
    with pytest.raises(ValueError, match="unknown compressor"):
        compressor.start_params("svd", TINY, jax.random.key(0), rows(0))
    assert isinstance(module()[1].encode(rows(0))[0], Code)
