"""The smoothed update: the largest fraction that fits, exact ends, few evaluations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import objectives as obj

OLD = {"w": jnp.zeros(3), "b": {"c": jnp.ones(())}}
NEW = {"w": jnp.array([1.0, 2.0, 4.0]), "b": {"c": jnp.float32(3.0)}}


def distance(scale, floor=0.0):
    """A KL that grows with the square of the step, above what stale data already has."""
    return lambda params: floor + scale * jnp.square(params["w"][0])


@jax.jit
def smoothed(scale, floor, target):
    return obj.smooth_update_with_kl(OLD, NEW, distance(scale, floor), target=target)


@pytest.mark.parametrize(
    ("scale", "fraction"),
    [(0.01, 1.0), (0.05, 1.0), (0.06, 0.5), (0.3, 0.25), (1.0, 0.125), (3.2, 0.125), (3.3, 0.0), (1e9, 0.0)],
)
def test_largest_fraction_that_fits(scale, fraction):
    params, f, kl, old_kl = smoothed(scale, 0.0, 0.05)
    assert f == fraction
    np.testing.assert_allclose(params["w"], fraction * np.array([1.0, 2.0, 4.0]))
    np.testing.assert_allclose(params["b"]["c"], 1 + 2 * fraction)
    np.testing.assert_allclose(kl, scale * fraction**2, rtol=1e-6)
    assert old_kl == 0
    assert kl <= 0.05 + 1e-7


def test_stale_data_moves_the_bound():
    """KL(0) = 0.2 is above the target already: a step is taken as long as it does not add to it."""
    _, f, kl, old_kl = smoothed(0.0, 0.2, 0.05)
    assert f == 1
    np.testing.assert_allclose([kl, old_kl], 0.2)
    _, f, _, _ = smoothed(1.0, 0.2, 0.05)
    assert f == 0
    _, f, kl, _ = smoothed(-0.1, 0.2, 0.05)
    assert f == 1
    np.testing.assert_allclose(kl, 0.1, rtol=1e-6)


def test_known_kl_of_the_old_parameters_saves_a_call():
    calls = []

    def counted(params):
        jax.debug.callback(lambda: calls.append(1))
        return distance(0.3)(params)

    run = jax.jit(functools.partial(obj.smooth_update, OLD, NEW, counted, target=0.05))
    params, f = run()
    jax.effects_barrier()
    assert f == 0.25
    assert len(calls) == 4  # the old parameters, 1, 1/2, 1/4
    calls.clear()
    with_known, f = jax.jit(functools.partial(obj.smooth_update, OLD, NEW, counted, target=0.05, old_kl=0.0))()
    jax.effects_barrier()
    assert f == 0.25
    assert len(calls) == 3
    np.testing.assert_array_equal(params["w"], with_known["w"])


def test_divergence_is_traced_once():
    traces = []

    def counted(params):
        traces.append(1)
        return distance(0.3)(params)

    jax.jit(functools.partial(obj.smooth_update, OLD, NEW, counted, target=0.05))()
    assert len(traces) == 1


def test_ends_are_exact():
    rng = np.random.default_rng(0)
    old, new = ({"w": jnp.asarray(rng.normal(size=100), jnp.float32)} for _ in range(2))
    accepted, f = jax.jit(lambda: obj.smooth_update(old, new, lambda p: jnp.float32(0.0), target=0.05))()
    assert f == 1
    np.testing.assert_array_equal(accepted["w"], new["w"])
    refuse = lambda p: jnp.where(jnp.all(p["w"] == old["w"]), 0.0, 9.0)  # noqa: E731
    refused, f = jax.jit(lambda: obj.smooth_update(old, new, refuse, target=0.05))()
    assert f == 0
    np.testing.assert_array_equal(refused["w"], old["w"])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_proposal_that_is_not_finite_is_refused(bad):
    new = {"w": jnp.array([bad, 1.0, 1.0]), "b": {"c": jnp.ones(())}}
    params, f = jax.jit(lambda: obj.smooth_update(OLD, new, distance(1.0), target=0.05))()
    assert f == 0
    np.testing.assert_array_equal(params["w"], np.zeros(3))


def test_types_are_kept():
    old, new = {"w": jnp.zeros(3, jnp.bfloat16)}, {"w": jnp.ones(3, jnp.bfloat16)}
    kl_fn = lambda p: 0.1 * p["w"][0].astype(jnp.float32)  # noqa: E731
    params, f = obj.smooth_update(old, new, kl_fn, target=0.05)
    assert f == 0.5
    assert params["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(params["w"].astype(np.float32), 0.5)


def test_wrong_inputs_are_refused():
    with pytest.raises(ValueError, match="target must be above 0"):
        obj.smooth_update(OLD, NEW, distance(1.0), target=0.0)
    with pytest.raises(AssertionError):
        obj.smooth_update(OLD, {"w": jnp.zeros(4), "b": {"c": jnp.ones(())}}, distance(1.0), target=0.05)
    with pytest.raises(AssertionError):
        obj.smooth_update(OLD, NEW, lambda p: p["w"], target=0.05)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_all_devices_take_the_same_fraction(check_vma):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def update(old, new, scale):
        kl_fn = lambda p: jax.lax.pmean((scale * jnp.square(p["w"][0]))[0], "data")  # noqa: E731
        return obj.smooth_update(old, new, kl_fn, target=0.05)

    mapped = jax.shard_map(
        update,
        mesh=mesh,
        in_specs=(jax.P(), jax.P(), jax.P("data")),
        out_specs=jax.P(),
        check_vma=check_vma,
    )
    # Alone the devices would take 1 and 1/4; the mean of 0 and 0.6 takes 1/4.
    params, f = jax.jit(mapped)(OLD, NEW, jnp.array([0.0, 0.6]))
    assert f == 0.25
    np.testing.assert_allclose(params["w"], [0.25, 0.5, 1.0])
