import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODEL, quick_compile  # noqa: F401

from sao_jax.learner import compression
from sao_jax.models import compressor, memory
from sao_jax.models.compressor import CompressorConfig
from sao_jax.models.decoder import bind, init_params
from sao_jax.runtime.devices import data_mesh

B, T, SEGMENT = 4, 8, 4
WEIGHTS = {k: jnp.float32(v) for k, v in compression.WEIGHTS.items()}


def case(use, seed=0):
    """(codec, params, frozen, batch) with unequal masks in the rows."""
    rng = np.random.default_rng(seed)
    width = memory.kv_width(MODEL) if use == "kv" else MODEL.dim
    codec = CompressorConfig(width, 4, 3, 1)
    model = init_params(MODEL, jax.random.key(1))
    one = compressor.init_params(codec, jax.random.key(2))
    head = {"w": jnp.asarray(rng.normal(size=(MODEL.dim, 1)), jnp.float32), "b": jnp.zeros(1)}
    lengths = np.array([8, 3, 5, 2])[:, None]
    live = np.arange(T) < lengths
    mask = live & (rng.random((B, T)) < 0.6) & (np.arange(T) > 0)
    returns = rng.random((B, T)).astype(np.float32)
    tokens = rng.integers(0, MODEL.vocab_size, (B, T)).astype(np.int32)
    states = rng.normal(size=(B, T, MODEL.dim)).astype(np.float32)
    frozen = {"value": head, "variance": jnp.float32(2.0)}
    if use == "kv":
        batch = {"tokens": tokens, "mask": mask, "live": live, "return": returns}
        return codec, {"codec": [one]}, frozen | {"model": model, "variance": [jnp.float32(2.0)]}, batch
    if use == "critic":
        readout = memory.init_readout(MODEL, jax.random.key(3), head, 4)
        readout["read"] = jnp.ones(4)
        batch = {"states": states, "kept": live, "mask": mask, "live": live, "return": returns}
        return codec, {"codec": one, "readout": readout}, frozen, batch
    flat = {"next_token": tokens, "return": returns, "action": mask, "live": live}
    batch = {"states": states.reshape(-1, MODEL.dim)} | {k: v.reshape(-1) for k, v in flat.items()}
    return codec, {"codec": one}, frozen | {"head": bind(MODEL, model).head()}, batch


def step(use, devices, **options):
    codec, params, frozen, batch = case(use)
    program = compression.step_program(use, MODEL, codec, data_mesh(devices), segment=SEGMENT, **options)
    return program(compression.init(params), frozen, batch, WEIGHTS, dict.fromkeys(params, jnp.float32(0.01))), params


@pytest.mark.parametrize("use", compression.USES)
def test_two_devices_step_as_one(use):
    (single, means), _ = step(use, 1)
    (sharded, sharded_means), _ = step(use, 2)
    for name in means:
        np.testing.assert_allclose(means[name], sharded_means[name], rtol=1e-5)
    # The first moments of Adam after one step are a tenth of the clipped gradient.
    for a, b in zip(jax.tree.leaves(single["opt"].mu), jax.tree.leaves(sharded["opt"].mu), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("use", compression.USES)
def test_every_part_of_a_compressor_learns(use):
    (after, _), before = step(use, 1)
    _, before, _, _ = case(use)
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), after["params"], before)
    for path, change in jax.tree_util.tree_leaves_with_path(moved):
        if jax.tree_util.keystr(path) != "['readout']['age']" or change:  # nothing is two segments away here
            assert change > 1e-4, jax.tree_util.keystr(path)


@pytest.mark.parametrize("use", compression.USES)
def test_the_score_is_the_loss_before_the_step(use):
    codec, params, frozen, batch = case(use)
    sums = compression.score_program(use, MODEL, codec, data_mesh(1), segment=SEGMENT)(params, frozen, batch)
    (_, means), _ = step(use, 1)
    for name, (total, count) in sums.items():
        np.testing.assert_allclose(total / count, means[name], rtol=1e-5)


def test_parts_move_at_their_own_rates():
    codec, params, frozen, batch = case("critic")
    program = compression.step_program("critic", MODEL, codec, data_mesh(1), segment=SEGMENT)
    rates = {"codec": jnp.float32(0.0), "readout": jnp.float32(0.01)}
    after, _ = program(compression.init(params), frozen, batch, WEIGHTS, rates)
    _, before, _, _ = case("critic")
    for a, b in zip(jax.tree.leaves(after["params"]["codec"]), jax.tree.leaves(before["codec"]), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(np.abs(after["params"]["readout"]["bias"] - before["readout"]["bias"]), 0.01, rtol=1e-3)


def test_a_fixed_codec_stays_while_the_critic_learns():
    (after, _), _ = step("critic", 1, train_codec=False)
    _, before, _, _ = case("critic")
    for a, b in zip(jax.tree.leaves(after["params"]["codec"]), jax.tree.leaves(before["codec"]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(np.asarray(after["params"]["readout"]["own"]) - np.asarray(before["readout"]["own"])).max() > 1e-4


@pytest.mark.parametrize("use", compression.USES)
def test_what_is_not_live_changes_nothing(use):
    codec, params, frozen, batch = case(use)
    if use == "kv":
        other = batch | {"tokens": np.where(batch["live"], batch["tokens"], 3)}
    else:
        live = batch["live"][..., None]
        if use == "states":  # a state counts where it is kept or where an action is chosen from it
            live = live | batch["action"][..., None]
        other = batch | {"states": np.where(live, batch["states"], 50.0)}
    program = compression.score_program(use, MODEL, codec, data_mesh(1), segment=SEGMENT)
    first, second = program(params, frozen, batch), program(params, frozen, other)
    for name in first:
        np.testing.assert_allclose(first[name], second[name], rtol=1e-5)


def test_likelihood_and_values_without_loss_are_the_models_own():
    codec, _, frozen, batch = case("kv")
    codec = CompressorConfig(codec.width_in, codec.width_in, 1, 1)
    params = {"codec": [compressor.truncation_params(codec)]}
    mesh = data_mesh(1)
    exact = compression.score_program("kv", MODEL, None, mesh, segment=SEGMENT)({}, frozen, batch)
    kept = compression.score_program("kv", MODEL, codec, mesh, segment=SEGMENT)(params, frozen, batch)
    for name in ("nll", "value"):
        np.testing.assert_allclose(kept[name], exact[name], rtol=1e-5)
    assert float(kept["reconstruction"][0]) < 1e-8


def test_an_unknown_use_is_refused():
    with pytest.raises(ValueError, match="allowed: states, critic, kv"):
        compression.step_program("cache", MODEL, None, data_mesh(1))
