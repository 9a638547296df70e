"""Several trajectories in one row give what each gives in a row of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_compile  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.models import attention as attn
from sao_jax.models.config import ModelConfig
from sao_jax.models.critic import critic_outputs, init_critic, prefix_values
from sao_jax.models.decoder import bind, init_params, pack_positions
from sao_jax.models.logprobs import next_token_logprobs

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = ModelConfig(vocab_size=17, dim=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=16)
T = 70  # more than one block of queries
FORMS = [attn.causal_attention, attn.blockwise_causal_attention, attn.fused_causal_attention, attn.attention]


def pack_ids(*rows):
    """[rows, T]: ids from the lengths of each row's packs; the rest is the padding's pack."""
    out = np.zeros((len(rows), T), np.int32)
    for row, lengths in zip(out, rows, strict=True):
        row[:] = np.searchsorted(np.cumsum(lengths), np.arange(T), side="right")
    return out


def test_positions_restart_at_each_pack():
    np.testing.assert_array_equal(pack_positions(jnp.array([[4, 4, 4, 7, 7, 9], [0, 0, 0, 0, 0, 0]])),
                                  [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_attention_over_packs_is_attention_over_each(form):
    ids = pack_ids([5, 40, 20], [33, 1, 1])
    rng = np.random.default_rng(0)
    q, k, v, d = (rng.normal(size=(2, T, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4))

    @jax.jit
    def packed(q, k, v, d):
        out, pullback = jax.vjp(lambda q, k, v: form(q, k, v, ids), q, k, v)
        return out, *pullback(d)

    got = packed(q, k, v, d)
    for row in range(2):
        for pack in np.unique(ids[row]):
            at = row, ids[row] == pack
            alone = [np.zeros((1, T, *x.shape[2:]), np.float32) for x in (q, k, v, d)]
            for own, x in zip(alone, (q, k, v, d), strict=True):
                own[0, : at[1].sum()] = x[at]
            for whole, own in zip(got, reference(*alone), strict=True):
                np.testing.assert_allclose(whole[at], own[0, : at[1].sum()], atol=2e-5)


@jax.jit
def reference(q, k, v, d):
    out, pullback = jax.vjp(attn.causal_attention, q, k, v)
    return out, *pullback(d)


@pytest.fixture(scope="module")
def params():
    policy = jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(0))
    critic = init_critic(MODEL, policy)
    critic["head"]["w"] = jnp.linspace(-0.3, 0.3, MODEL.dim)[:, None]
    return {"policy": policy, "critic": critic}


def terms(params, tokens, length, ids=None, temperature=1.0):
    """(log-prob, value) [B, T] and the bootstrap of rows, packed or not."""
    model = bind(MODEL, params["policy"])
    logp, _ = next_token_logprobs(model(tokens, pack_ids=ids), model.head(), tokens, temperature, pack_ids_BxT=ids)
    outputs = critic_outputs(MODEL, params["critic"], tokens, pack_ids=ids)
    return logp, *prefix_values(outputs, length, pack_ids=ids)


@jax.jit
def loss_and_gradient(params, tokens, length, weight, ids=None, temperature=1.0):
    def loss(params):
        logp, values, bootstrap = terms(params, tokens, length, ids, temperature)
        return (weight * (logp + jnp.square(values - 0.5))).sum(), (logp, values, bootstrap)

    return jax.value_and_grad(loss, has_aux=True)(params)


@st.composite
def packings(draw):
    """Lengths of the packs of two rows, at most 8 packs in all."""
    rows = []
    for _ in range(2):
        lengths, left = [], T
        for _ in range(draw(st.integers(1, 4))):
            if left:
                lengths.append(draw(st.integers(1, left)))
                left -= lengths[-1]
        rows.append(lengths)
    return rows


@given(packings(), st.integers(0, 2**16))
@settings(max_examples=15, deadline=None)
def test_packed_equals_unpacked_in_log_probs_values_loss_and_gradients(params, rows, seed):
    rng = np.random.default_rng(seed)
    ids = pack_ids(*rows)
    tokens = rng.integers(0, MODEL.vocab_size, (2, T)).astype(np.int32)
    weight = np.zeros((2, T), np.float32)
    heat = np.ones((2, T), np.float32)
    apart = {"tokens": np.zeros((8, T), np.int32), "weight": np.zeros((8, T), np.float32)}
    apart |= {"length": np.zeros(8, np.int32), "heat": np.ones(8, np.float32)}
    places = []
    for row, lengths in enumerate(rows):
        for start, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
            n, at = len(places), (row, slice(start, start + length))
            weight[at] = rng.normal(size=length)
            heat[at] = apart["heat"][n] = rng.uniform(0.5, 2.0)
            apart["tokens"][n, :length], apart["weight"][n, :length] = tokens[at], weight[at]
            apart["length"][n] = length
            places.append(at)
    total = np.abs(weight).sum()  # a mean, as in training: a sum's rounding grows with its terms
    weight, apart["weight"] = weight / total, apart["weight"] / total
    (loss, packed), gradient = loss_and_gradient(
        params, tokens, np.array([sum(lengths) for lengths in rows], np.int32), weight, ids, heat
    )
    (want_loss, own), want_gradient = loss_and_gradient(
        params, apart["tokens"], apart["length"], apart["weight"], None, apart["heat"]
    )
    for n, at in enumerate(places):
        for name, whole, alone in zip(("log-prob", "value"), packed, own, strict=False):
            np.testing.assert_allclose(whole[at], alone[n, : apart["length"][n]], atol=1e-5, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(packed[2][at], np.full(apart["length"][n], own[2][n]), atol=1e-5, rtol=1e-5)
    assert abs(float(loss - want_loss)) < 1e-5
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(want_gradient), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1.0, np.abs(want).max()))


def test_first_token_of_a_pack_has_value_zero_and_each_pack_its_own_bootstrap():
    outputs = jnp.array([[10.0, 11.0, 12.0, 13.0, 14.0, 15.0], [20.0, 21.0, 22.0, 23.0, 24.0, 25.0]])
    ids = jnp.array([[0, 0, 0, 1, 1, 2], [3, 3, 3, 3, 5, 5]])  # the second row is full
    values, bootstrap = prefix_values(outputs, jnp.array([5, 6]), pack_ids=ids)
    np.testing.assert_array_equal(values, [[0, 10, 11, 0, 13, 0], [0, 20, 21, 22, 0, 24]])
    np.testing.assert_array_equal(bootstrap, [[12, 12, 12, 14, 14, 0], [23, 23, 23, 23, 25, 25]])


def test_bootstrap_ends_at_the_length_even_where_padding_shares_the_last_id():
    _, bootstrap = prefix_values(jnp.arange(1.0, 6.0)[None], jnp.array([3]), pack_ids=jnp.zeros((1, 5), jnp.int32))
    np.testing.assert_array_equal(bootstrap, [[3, 3, 3, 0, 0]])


def test_a_row_of_one_pack_is_a_row_without_packs(params):
    tokens = np.random.default_rng(3).integers(0, MODEL.vocab_size, (2, T)).astype(np.int32)
    length = np.full(2, T, np.int32)
    run = jax.jit(terms)
    logp, values, bootstrap = run(params, tokens, length)
    same = run(params, tokens, length, np.zeros((2, T), np.int32))
    np.testing.assert_allclose(same[0], logp, atol=1e-6)
    np.testing.assert_allclose(same[1], values, atol=1e-6)
    np.testing.assert_allclose(same[2], np.broadcast_to(bootstrap[:, None], (2, T)), atol=1e-6)


def test_what_another_pack_holds_changes_nothing(params):
    ids = pack_ids([30, 30], [30, 40])
    tokens = np.random.default_rng(4).integers(0, MODEL.vocab_size, (2, T)).astype(np.int32)
    changed = tokens.copy()
    changed[:, :30] = 3
    run = jax.jit(lambda tokens: terms(params, tokens, np.full(2, 60, np.int32), ids)[:2])
    for before, after in zip(run(tokens), run(changed), strict=True):
        np.testing.assert_array_equal(before[:, 30:], after[:, 30:])
        assert np.abs(np.asarray(before[:, 1:30] - after[:, 1:30])).max() > 1e-3
