import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODEL, quick_compile  # noqa: F401

from sao_jax.models import compressor, memory
from sao_jax.models.compressor import CompressorConfig
from sao_jax.models.decoder import bind, init_params, rotary_angles

CODEC = CompressorConfig(memory.kv_width(MODEL), 4, 2, 1)
T, SEGMENT = 12, 4


@pytest.fixture(scope="module")
def model():
    return bind(MODEL, init_params(MODEL, jax.random.key(0)))


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, T)))


def codecs(config=CODEC):
    return [compressor.init_params(config, jax.random.key(i)) for i in range(MODEL.num_layers)]


def lossless():
    """As wide as what it compresses: nothing is lost."""
    config = CompressorConfig(CODEC.width_in, CODEC.width_in, 1, 1)
    return config, [compressor.truncation_params(config)] * MODEL.num_layers


def test_keys_and_values_come_back_from_one_row():
    rng = np.random.default_rng(1)
    shape = (2, 5, MODEL.num_kv_heads, MODEL.head_dim)
    k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    angles = rotary_angles(7 + jnp.arange(5), MODEL.head_dim, MODEL.rope_theta)
    for a, b in zip(memory.unflatten_kv(MODEL, memory.flatten_kv(k, v, *angles), *angles), (k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("segment", [4, 5, 12, 20])
def test_without_loss_segments_are_the_whole_row(model, tokens, segment):
    np.testing.assert_allclose(memory.forward(model, tokens, segment, *lossless())[0], model(tokens), atol=1e-5)


def test_what_is_compressed_in_one_segment_are_the_rows_of_the_model(model, tokens):
    _, seen = memory.forward(model, tokens, T, CODEC, codecs())
    for (kv, *_), row in zip(seen, memory.kv_rows(model, tokens), strict=True):
        np.testing.assert_allclose(kv, row.reshape(kv.shape), atol=1e-5)


def test_one_segment_needs_no_memory(model, tokens):
    np.testing.assert_allclose(memory.forward(model, tokens, T, CODEC, codecs())[0], model(tokens), atol=1e-5)


def test_a_compressed_past_changes_later_segments_only(model, tokens):
    exact, compressed = model(tokens), memory.forward(model, tokens, SEGMENT, CODEC, codecs())[0]
    np.testing.assert_allclose(compressed[:, :SEGMENT], exact[:, :SEGMENT], atol=1e-5)
    assert float(jnp.abs(compressed - exact)[:, SEGMENT:].max(-1).min()) > 1e-4


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("block", [4, 8, 256])
def test_reading_segment_by_segment_is_reading_the_row(model, tokens, experts, top_k, block, monkeypatch):
    monkeypatch.setattr(memory, "BLOCK", block)
    config = CompressorConfig(CODEC.width_in, 4, experts, top_k)
    params = codecs(config)
    whole = memory.forward(model, tokens, SEGMENT, config, params)[0]
    held = memory.init_memory(MODEL, config, 2, 16)
    read = jax.jit(lambda held, piece, start: memory.read_segment(model, config, params, held, piece, start))
    for start in range(0, T, SEGMENT):
        hidden, held = read(held, tokens[:, start : start + SEGMENT], start)
        np.testing.assert_allclose(hidden, whole[:, start : start + SEGMENT], atol=1e-5)
    assert read._cache_size() == 1
    assert sum(x.nbytes for x in jax.tree.leaves(held)) == 2 * 16 * config.code_bytes * MODEL.num_layers


def test_what_a_segment_needs_beside_the_memory_does_not_grow_with_it(model):
    def temporary(capacity):
        held = jax.eval_shape(lambda: memory.init_memory(MODEL, CODEC, 1, capacity))
        read = jax.jit(lambda held, *rest: memory.read_segment(model, CODEC, codecs(), held, *rest), donate_argnums=0)
        compiled = read.lower(held, jnp.zeros((1, SEGMENT), int), 0).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4096) == temporary(512)


def test_a_memory_that_blocks_do_not_fill_is_refused():
    with pytest.raises(ValueError, match="multiple of 256"):
        memory.init_memory(MODEL, CODEC, 1, 300)


def test_what_stays_are_actions_what_chose_them_and_ends_of_segments():
    mask = jnp.array([[0, 1, 0, 0, 0, 0, 1, 0]], bool)
    np.testing.assert_array_equal(memory.kept_positions(mask, 4)[0], [1, 1, 0, 1, 0, 1, 1, 1])


def test_segments_read_by_themselves_know_nothing_of_each_other(model, tokens):
    states = memory.segment_states(model, tokens, SEGMENT)
    np.testing.assert_allclose(states[:, 4:8], model(tokens[:, 4:8]), atol=1e-5)


def test_values_of_the_memory_critic_match_a_loop():
    rng = np.random.default_rng(2)
    D = MODEL.dim
    head = {"w": jnp.asarray(rng.normal(size=(D, 1)), jnp.float32), "b": jnp.ones(1)}
    start = memory.init_readout(MODEL, jax.random.key(0), head, 3)
    readout = jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), np.float32), start)
    h, m = (rng.normal(size=(1, 6, D)).astype(np.float32) for _ in range(2))
    kept = np.array([[1, 0, 1, 1, 0, 1]], bool)
    np.testing.assert_allclose(memory.memory_values(start, h, m, kept, 2), (h @ head["w"])[..., 0] + 1, rtol=1e-4)
    values = memory.memory_values(readout, h, m, kept, 2)[0]
    for t in range(6):
        seen = [j for j in range(6) if kept[0, j] and j // 2 < t // 2]
        scores = [
            (h[0, t] @ readout["query"]) @ (m[0, j] @ readout["key"]) / 3**0.5 - readout["age"] * (t // 2 - j // 2)
            for j in seen
        ]
        e = np.exp(np.array([*scores, 0.0]))
        read = sum((w * (m[0, j] @ readout["value"]) for w, j in zip(e / e.sum(), seen, strict=False)), np.zeros(3))
        expected = readout["own"] @ h[0, t] + readout["read"] @ read + readout["bias"]
        np.testing.assert_allclose(values[t], expected, rtol=1e-4, atol=1e-4)
