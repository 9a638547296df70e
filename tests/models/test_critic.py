"""The value model: start, alignment of its values, and which of its leaves are frozen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models.config import ModelConfig
from sao_jax.models.critic import critic_outputs, init_critic, matching_leaves, prefix_values
from sao_jax.models.decoder import init_params

TINY = ModelConfig(vocab_size=11, dim=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=12, tied=False)
TOKENS = np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def policy():
    return jax.jit(lambda key: init_params(TINY, key))(jax.random.key(0))


def norm(tree):
    return float(jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(tree))))


outputs_of = jax.jit(critic_outputs, static_argnums=0)


@jax.jit
def loss_gradient(params):
    return jax.grad(lambda p: 0.5 * ((critic_outputs(TINY, p, TOKENS) - 1.0) ** 2).sum())(params)


def test_initial_values_are_exactly_zero(policy):
    outputs = outputs_of(TINY, init_critic(TINY, policy), TOKENS)
    assert outputs.dtype == jnp.float32
    np.testing.assert_array_equal(outputs, np.zeros((2, 5)))


def test_head_learns_at_the_first_step_and_the_trunk_at_the_second(policy):
    params = init_critic(TINY, policy)
    first = loss_gradient(params)
    assert norm(first["head"]["w"]) > 0
    assert norm(first["head"]["b"]) > 0
    assert norm(first["trunk"]) == 0
    second = loss_gradient(jax.tree.map(lambda p, g: p - 0.1 * g, params, first))
    for path, leaf in jax.tree_util.tree_leaves_with_path(second["trunk"]):
        assert norm(leaf) > 0, path


def test_trunk_starts_as_an_independent_copy_without_the_output_head(policy):
    params = init_critic(TINY, policy)
    assert set(params) == {"trunk", "head"}
    assert set(params["trunk"]) == set(policy) - {"unembed"}
    for name, leaf in params["trunk"].items():
        jax.tree.map(np.testing.assert_array_equal, leaf, policy[name])
    pointers = [{x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)} for tree in (params, policy)]
    assert not pointers[0] & pointers[1]


def test_head_stays_float32_on_a_bfloat16_trunk(policy):
    config = dataclasses.replace(TINY, dtype="bfloat16")
    params = init_critic(config, policy)
    # 1 + 2^-10 is not a bfloat16 number: the bias survives only in float32.
    params["head"]["b"] = jnp.full((1,), 1 + 2**-10)
    np.testing.assert_array_equal(outputs_of(config, params, TOKENS), np.full((2, 5), 1 + 2**-10, np.float32))


def test_output_is_the_value_of_the_prefix_that_ends_there(policy):
    params = init_critic(TINY, policy)
    params["head"]["w"] = jnp.ones_like(params["head"]["w"])
    before = np.asarray(outputs_of(TINY, params, TOKENS))
    changed = TOKENS.copy()
    changed[:, 3] = [0, 1]
    after = np.asarray(outputs_of(TINY, params, changed))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (np.abs(before[:, 3:] - after[:, 3:]) > 0).all()


def test_value_of_a_token_is_read_one_position_before_it():
    outputs = jnp.array([[10.0, 11.0, 12.0, 13.0, 14.0]])  # prompt of 2, response of 3
    values, bootstrap = prefix_values(outputs, jnp.array([4]))
    np.testing.assert_array_equal(values, [[0.0, 10.0, 11.0, 12.0, 13.0]])
    np.testing.assert_array_equal(values[0, 2:], [11.0, 12.0, 13.0])
    # The response mask [1, 1, 0] applies to the values unshifted.
    np.testing.assert_array_equal(values[0, 2:][np.array([1, 1, 0], bool)], [11.0, 12.0])
    np.testing.assert_array_equal(bootstrap, [13.0])


def test_bootstrap_is_the_value_of_everything_stored():
    outputs = jnp.arange(12.0).reshape(3, 4) + 1
    _, bootstrap = prefix_values(outputs, jnp.array([1, 4, 0]))
    np.testing.assert_array_equal(bootstrap, [1.0, 8.0, 0.0])


def test_attention_leaves_are_found_by_pattern(policy):
    params = init_critic(TINY, policy)
    frozen = matching_leaves(params, ["*/attn/*"])
    paths = [
        jax.tree_util.keystr(p, simple=True, separator="/")
        for p, hit in jax.tree_util.tree_leaves_with_path(frozen)
        if hit
    ]
    assert paths == [f"trunk/layers/{i}/attn/{name}" for i in (0, 1) for name in ("norm", "out", "qkv")]
    assert jax.tree.structure(frozen) == jax.tree.structure(params)
    assert not any(jax.tree.leaves(matching_leaves(params, [])))
    assert matching_leaves(params, ["head/w", "trunk/layers/0/attn/qkv"])["head"] == {"b": False, "w": True}


def test_pattern_that_matches_nothing_is_an_error_that_shows_paths(policy):
    params = init_critic(TINY, policy)
    with pytest.raises(ValueError, match=r"'\*/attention/\*' matches no parameter.*trunk/"):
        matching_leaves(params, ["head/*", "*/attention/*"])
