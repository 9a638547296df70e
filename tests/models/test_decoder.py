"""The decoder against an independent forward pass in NumPy, and the properties training relies on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models.config import ModelConfig
from sao_jax.models.decoder import bind, init_params, rms_norm, rotary_angles, rotate
from sao_jax.models.norms import normalize, scaled_product

TINY = ModelConfig(vocab_size=13, dim=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=20)
TOKENS = np.array([[1, 5, 2, 12, 0, 7, 7], [3, 3, 9, 4, 10, 11, 6]])


@functools.partial(jax.jit, static_argnums=0)
def random_params(config):
    """Fresh parameters with random gains: at 1, where they start, a forgotten or doubled gain would not show."""
    params = init_params(config, jax.random.key(1))
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return jax.tree.unflatten(
        structure,
        [
            jax.random.uniform(k, x.shape, minval=0.5, maxval=1.5) if x.ndim == 1 else x
            for k, x in zip(keys, leaves, strict=True)
        ],
    )


def numpy_forward(config, params, tokens):
    """One row of tokens -> final normalised hidden states, in float64, position by position."""
    c = config
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(x, gain):
        return x / np.sqrt((x**2).mean() + c.norm_eps) * gain

    def turn(x, position):
        half = c.head_dim // 2
        out = np.empty_like(x)
        for i in range(half):
            angle = position * c.rope_theta ** (-2 * i / c.head_dim)
            z = complex(x[i], x[i + half]) * complex(np.cos(angle), np.sin(angle))
            out[i], out[i + half] = z.real, z.imag
        return out

    x = [params["embed"][token] for token in tokens]
    for layer in range(c.num_layers):
        attn, mlp = params["layers"][str(layer)]["attn"], params["layers"][str(layer)]["mlp"]
        keys, values, mixed = [], [], []
        for t, hidden in enumerate(x):
            heads = (norm(hidden, attn["norm"]) @ attn["qkv"]).reshape(-1, c.head_dim)
            q = heads[: c.num_heads]
            k = heads[c.num_heads : c.num_heads + c.num_kv_heads]
            if c.qk_norm:
                q = [norm(h, attn["q_norm"]) for h in q]
                k = [norm(h, attn["k_norm"]) for h in k]
            keys.append([turn(h, t) for h in k])
            values.append(heads[c.num_heads + c.num_kv_heads :])
            outs = []
            for h in range(c.num_heads):
                kv = h * c.num_kv_heads // c.num_heads
                scores = np.array([key[kv] @ turn(q[h], t) for key in keys]) / np.sqrt(c.head_dim)
                weights = np.exp(scores) / np.exp(scores).sum()
                outs.append(sum(w * value[kv] for w, value in zip(weights, values, strict=True)))
            mixed.append(hidden + np.concatenate(outs) @ attn["out"])
        x = []
        for hidden in mixed:
            y = norm(hidden, mlp["norm"])
            gate = y @ mlp["gate"]
            x.append(hidden + (gate / (1 + np.exp(-gate)) * (y @ mlp["up"])) @ mlp["down"])
    return np.stack([norm(hidden, params["norm"]) for hidden in x])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, id="grouped, tied"),
        pytest.param({"qk_norm": True, "tied": False, "num_kv_heads": 4}, id="qk-norm, untied, no groups"),
        pytest.param({"num_kv_heads": 1, "rope_theta": 100.0, "norm_eps": 0.1}, id="one kv head"),
    ],
)
def test_forward_equals_an_independent_numpy_pass(change):
    config = dataclasses.replace(TINY, **change)
    params = random_params(config)

    @jax.jit
    def run(params):
        model = bind(config, params)
        hidden = model(TOKENS)
        return hidden, hidden @ model.head()

    hidden, logits = run(params)
    for row in range(2):
        want = numpy_forward(config, params, TOKENS[row])
        np.testing.assert_allclose(hidden[row], want, atol=2e-5)
        head = np.asarray(params["embed"]).T if config.tied else np.asarray(params["unembed"])
        np.testing.assert_allclose(logits[row], want @ head, atol=5e-5)


def test_parameter_layout():
    config = dataclasses.replace(TINY, qk_norm=True, tied=False)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(lambda: init_params(config, jax.random.key(0))))
    layer = {
        "attn": {"norm": (12,), "qkv": (12, 48), "out": (24, 12), "q_norm": (6,), "k_norm": (6,)},
        "mlp": {"norm": (12,), "gate": (12, 20), "up": (12, 20), "down": (20, 12)},
    }
    assert shapes == {
        "embed": (13, 12), "norm": (12,), "unembed": (12, 13), "layers": {"0": layer, "1": layer},
    }  # fmt: skip
    assert set(jax.eval_shape(lambda: init_params(TINY, jax.random.key(0)))) == {"embed", "norm", "layers"}


@pytest.fixture(scope="module")
def forward():
    params = random_params(TINY)
    return jax.jit(lambda tokens: bind(TINY, params)(tokens))


@pytest.mark.parametrize("position", [0, 3, 6])
def test_changing_a_token_changes_no_output_before_it(forward, position):
    changed = TOKENS.copy()
    changed[:, position] = 8
    before, after = np.asarray(forward(TOKENS)), np.asarray(forward(changed))
    np.testing.assert_array_equal(before[:, :position], after[:, :position])
    assert (np.abs(before - after)[:, position:].max(-1) > 1e-6).all()


def test_rows_do_not_mix(forward):
    changed = TOKENS.copy()
    changed[1] = 8
    np.testing.assert_array_equal(forward(TOKENS)[0], forward(changed)[0])


def test_train_and_eval_mode_give_the_same_repeatable_result():
    params = random_params(TINY)

    def run(prepare):
        model = bind(TINY, params)
        prepare(model)
        return jax.jit(lambda tokens: model(tokens))(TOKENS)

    results = [run(prepare) for prepare in (lambda m: m.train(), lambda m: m.eval(), lambda m: m.train())]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_every_parameter_receives_a_finite_gradient():
    config = dataclasses.replace(TINY, qk_norm=True, tied=False)
    params = random_params(config)

    @jax.jit
    def gradient(params):
        def loss(p):
            model = bind(config, p)
            return jax.nn.log_softmax(model(TOKENS) @ model.head())[..., 0].sum()

        return jax.grad(loss)(params)

    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(params)):
        assert np.isfinite(leaf).all(), path
        assert np.abs(leaf).max() > 0, path


def test_gradient_is_the_slope_of_the_numpy_pass():
    """Checks the custom VJP of attention in its place, against differences of the independent forward."""
    params = random_params(TINY)
    direction = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), params)
    weights = np.cos(np.arange(7 * 12)).reshape(7, 12)
    gradient = jax.jit(jax.grad(lambda p: (bind(TINY, p)(TOKENS[:1])[0] * weights).sum()))(params)
    predicted = sum(float((g * d).sum()) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    h = 1e-5

    def at(sign):
        moved = jax.tree.map(
            lambda x, d: np.asarray(x, np.float64) + sign * h * np.asarray(d, np.float64), params, direction
        )
        return (numpy_forward(TINY, moved, TOKENS[0]) * weights).sum()

    np.testing.assert_allclose(predicted, (at(1) - at(-1)) / (2 * h), rtol=1e-3)


def test_bfloat16_stays_close_to_float32(forward):
    config = dataclasses.replace(TINY, dtype="bfloat16")
    params = random_params(TINY)
    hidden = jax.jit(lambda p: bind(config, p)(TOKENS))(params)
    assert hidden.dtype == jnp.bfloat16
    exact = np.asarray(forward(TOKENS))
    error = np.abs(np.asarray(hidden, np.float32) - exact)
    assert error.max() < 0.05 * np.abs(exact).max()


def test_rotation_depends_on_relative_position_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))
    cos, sin = rotary_angles(jnp.arange(40), 8, 10_000.0)

    def score(i, j):
        return float((rotate(q, cos[i : i + 1], sin[i : i + 1]) * rotate(k, cos[j : j + 1], sin[j : j + 1])).sum())

    assert score(9, 4) == pytest.approx(score(35, 30), abs=1e-4)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_norm_by_hand_and_its_types():
    # mean square of (3, 4) is 12.5
    np.testing.assert_allclose(normalize(jnp.array([3.0, 4.0]), 0.0), np.array([3, 4]) / np.sqrt(12.5), rtol=1e-6)
    np.testing.assert_allclose(normalize(jnp.array([3.0, 4.0]), 3.5), [0.75, 1.0], rtol=1e-6)
    x16 = jnp.array([3.0, 4.0], jnp.bfloat16)
    assert normalize(x16, 0.0).dtype == jnp.float32
    assert rms_norm(x16, jnp.ones(2), 0.0).dtype == jnp.bfloat16


@pytest.mark.parametrize("rows", [2, 30])  # fewer and more than the width of the product
def test_gain_goes_to_either_factor_with_the_same_result(rows):
    y, weight = jax.random.normal(jax.random.key(0), (rows, 6)), jax.random.normal(jax.random.key(1), (6, 10))
    gain = jnp.linspace(0.5, 2.0, 6)
    got = scaled_product(y, gain, weight, jnp.float32)
    np.testing.assert_allclose(got, np.einsum("nd,d,df->nf", y, gain, weight), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 5}, "head_dim is 5.*even"),
        ({"dtype": "float16"}, "dtype is 'float16'; allowed: float32, bfloat16"),
        ({"num_layers": 0}, "num_layers is 0; it must be at least 1"),
    ],
)
def test_impossible_shapes_are_refused_with_the_reason(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)
