"""Whitening, effective sample size, reductions: by hand, and the same over devices as on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives_jitted import fast

from sao_jax import objectives as obj

close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
NAN = np.nan
P = jax.P
ROWS = P("data")
both_modes = pytest.mark.parametrize("check_vma", [True, False])


def on_two_devices(f, *, check_vma, in_specs=ROWS, out_specs=ROWS):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma))


@pytest.mark.parametrize(
    ("x", "mask"),
    [([3.0], [1]), ([3.0, 8.0], [1, 0]), ([3.0, 8.0], [0, 0]), ([2.0] * 3, [1] * 3), ([0.1] * 7, [1] * 7)],
)
def test_whitening_without_spread_gives_zero(x, mask):
    """One element, none, or equal ones: centred, exactly 0, never NaN; its gradient is finite as well."""
    assert fast.whiten(x, mask).tolist() == [0.0] * len(x)
    assert np.isfinite(jax.jit(jax.grad(lambda x: fast.whiten(x, mask).sum()))(np.array(x))).all()


def test_whitening_by_hand():
    close(fast.whiten([1.0, 3.0, 5.0, NAN], [1, 1, 1, 0]), [-1.224745, 0.0, 1.224745, 0.0])
    assert fast.whiten(np.ones((2, 3)), np.ones((2, 3))).shape == (2, 3)


@both_modes
def test_whitening_uses_the_statistics_of_all_devices(check_vma):
    x, mask = np.array([[1.0, 3.0], [5.0, 100.0]]), np.array([[1, 1], [1, 0]])
    f = on_two_devices(functools.partial(fast.whiten, axis_name="data"), check_vma=check_vma)
    close(f(x, mask), [[-1.224745, 0.0], [1.224745, 0.0]])
    # An empty shard still takes part.
    close(f(x, np.array([[1, 1], [0, 0]])), [[-1.0, 1.0], [0.0, 0.0]], atol=1e-6)
    close(f(x, np.zeros((2, 2))), np.zeros((2, 2)))


@jax.jit
def whitened(x, mask):
    return fast.whiten(x, mask)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_whitening_equals_numpy(seed):
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(3, 2, (3, 4)), rng.random((3, 4)) < 0.6
    got = np.asarray(whitened(np.where(mask, x, NAN), mask))
    assert (got[~mask] == 0).all()
    if mask.sum() > 1:
        close(got[mask], (x[mask] - x[mask].mean()) / np.sqrt(x[mask].var() + 1e-8), rtol=1e-4, atol=1e-5)


def test_effective_sample_size():
    ess = fast.effective_sample_size
    close(ess(np.zeros(4), np.ones(4)), 1.0)
    close(ess(np.full(4, 300.0), np.ones(4)), 1.0)
    w = np.array([1.0, 2.0, 3.0, 4.0])
    close(ess(np.log(w), np.ones(4)), w.sum() ** 2 / (4 * (w**2).sum()))
    close(ess(np.array([0.0, 0.0, 90.0, NAN]), np.array([1, 1, 0, 0])), 1.0)
    close(ess(np.array([0.0, -500.0, -500.0, -np.inf]), np.ones(4)), 0.25)
    assert np.isnan(ess(np.zeros(4), np.zeros(4)))


@both_modes
def test_whole_batch_functions_agree_over_devices(check_vma):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 4, 3))
    mask = rng.random((4, 3)) < 0.5
    mask[2:] = [[0, 0, 1], [0, 0, 0]]

    def everything(x, y, mask, axis_name=None):
        kw = {"axis_name": axis_name}
        return (
            fast.explained_variance(x, y, mask, **kw),
            fast.value_error(x, y, mask, reward_range=2.0, **kw),
            fast.effective_sample_size(x, mask, **kw),
            fast.masked_mean(x, mask, **kw),
            fast.masked_sum(x, mask, **kw),
            fast.masked_moments(x, mask, **kw)[:2],
        )

    f = on_two_devices(
        functools.partial(everything, axis_name="data"), check_vma=check_vma, in_specs=P("data"), out_specs=P()
    )
    for got, expected in zip(
        jax.tree.leaves(f(x, y, mask)), jax.tree.leaves(jax.jit(everything)(x, y, mask)), strict=True
    ):
        close(got, expected)


@both_modes
def test_loss_over_devices_is_sum_over_count(check_vma):
    """Token losses [4] and [1, 1, 1] on two devices: 7/4, not the mean of the means."""
    logp = -np.array([[4.0, 0, 0], [1.0, 1.0, 1.0]])
    mask = np.array([[1, 0, 0], [1, 1, 1]])

    def loss(logp, mask):
        ones = jnp.ones_like(logp)
        total, count = jax.lax.psum(fast.policy_loss(logp, ones, ones, mask), "data")
        return total / count

    close(on_two_devices(loss, check_vma=check_vma, out_specs=P())(logp, mask), 1.75)


@both_modes
def test_gradient_of_a_replicated_parameter_over_devices(check_vma):
    """d/dw of sum(d * w^3) = 3 w^2 sum(d) on every device.

    With check_vma the gradient of a replicated input is summed by shard_map; without it by one psum. A psum of the loss
    inside what is differentiated is in neither.
    """
    w, data = jnp.float32(2.0), np.array([[1.0], [3.0]])

    def gradient(w, data):
        def local(w):
            ones = jnp.ones(data.shape)
            return fast.policy_loss(-data * w**3, ones, ones, ones)

        (total, _), g = jax.value_and_grad(local, has_aux=True)(w)
        g = g if check_vma else jax.lax.psum(g, "data")
        return jax.lax.psum(total, "data"), jnp.broadcast_to(g, (1,))

    f = on_two_devices(gradient, check_vma=check_vma, in_specs=(P(), P("data")), out_specs=(P(), P("data")))
    total, g = f(w, data)
    close(total, 32.0)
    close(g, [48.0, 48.0])


def test_three_reductions_have_three_names():
    losses = np.array([[2.0, 2.0, 2.0, 2.0], [10.0, 0, 0, 0]])
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0]])
    ones = np.ones((2, 4))
    sums, counts = jax.vmap(fast.policy_loss)(-losses, ones, ones, mask)
    for kw, expected in (({}, 3.6), ({"by": "sequence"}, 6.0), ({"by": "constant", "length": 4}, 2.25)):
        total, count = fast.reduce_rows(sums, counts, **kw)
        close(total / count, expected)
    # A padded row without a token changes none of them.
    for by in ("token", "sequence", "constant"):
        kw = {"by": by, "length": 4 if by == "constant" else None}
        padded = fast.reduce_rows(np.append(sums, 0), np.append(counts, 0), **kw)
        close(padded, fast.reduce_rows(sums, counts, **kw))
    with pytest.raises(ValueError, match="token, sequence, constant"):
        obj.reduce_rows(sums, counts, by="mean")
    for kw in ({"by": "constant"}, {"by": "token", "length": 4}):
        with pytest.raises(ValueError, match="length belongs to"):
            obj.reduce_rows(sums, counts, **kw)


def test_soft_length_penalty():
    penalty = functools.partial(fast.soft_length_penalty, max_length=100, buffer=20)
    close(penalty([79, 80, 90, 100, 101]), [0.0, 0.0, -0.5, -1.0, -1.0])
    every = np.asarray(jax.jit(jax.vmap(penalty))(np.arange(300)))
    assert every.max() == 0
    assert every.min() == -1
    assert (np.diff(every) <= 0).all()
    for kw in ({"max_length": 100, "buffer": 0}, {"max_length": 100, "buffer": 101}):
        with pytest.raises(ValueError, match="buffer must be"):
            obj.soft_length_penalty([1], **kw)
