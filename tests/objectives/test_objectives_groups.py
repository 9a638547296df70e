"""Group baselines: equal rewards, whole groups, any order, groups of one."""

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
KINDS = ("grpo", "dr_grpo", "rloo", "mean")


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exactly_zero(kind):
    """Over many sizes in one call: a residue of rounding in the mean shows in most of them."""
    for reward in (0.1, 0.2, 0.3, 1 / 3, 0.7):
        ids = np.repeat(np.arange(2, 65), np.arange(2, 65))
        got = fast.group_advantages(np.full(ids.size, reward, np.float32), ids, kind=kind)
        assert (np.asarray(got) == 0).all()
    assert (np.asarray(fast.group_advantages(np.full(7, 0.1, np.float32), np.zeros(7, int), kind=kind)) == 0).all()


def test_kinds_by_hand():
    rewards, ids = np.array([0.0, 1.0, 1.0, 0.0]), np.zeros(4, int)
    close(fast.group_advantages(rewards, ids, kind="grpo"), [-1, 1, 1, -1])
    close(fast.group_advantages(rewards, ids, kind="dr_grpo"), [-0.5, 0.5, 0.5, -0.5])
    close(fast.group_advantages(rewards, ids, kind="mean"), [-0.5, 0.5, 0.5, -0.5])
    close(fast.group_advantages(rewards, ids, kind="rloo"), [-2 / 3, 2 / 3, 2 / 3, -2 / 3])
    close(fast.group_advantages(rewards, ids), [-1, 1, 1, -1])


def test_group_with_any_difference_stays_whole():
    rewards, ids = np.array([0.0, 0, 1, 0, 0]), np.zeros(5, int)
    assert fast.groups_with_signal(rewards, ids).tolist() == [True] * 5
    close(fast.group_advantages(rewards, ids, kind="rloo"), [-0.25, -0.25, 1.0, -0.25, -0.25])
    several = np.array([0.0, 0, 1, 0, 1, 1, 0.3, 0.3, 0, 1])
    ids = np.array([0, 0, 0, 1, 1, 1, 2, 2, 3, 3])
    assert fast.groups_with_signal(several, ids).tolist() == [True] * 6 + [False] * 2 + [True] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_group_of_one_is_never_silently_zero(kind):
    with pytest.raises(ValueError, match="at least 2 rollouts per group"):
        obj.group_advantages(np.array([1.0, -2.0]), np.array([0, 1]), kind=kind)
    # Ids cannot be read under a transformation: the raw reward, as documented.
    close(fast.group_advantages(np.array([1.0, -2.0]), np.array([0, 1]), kind=kind), [1.0, -2.0])


def test_check_of_group_sizes_counts_only_rows_that_take_part():
    obj.check_group_sizes([3, 1, 3, 1])
    obj.check_group_sizes([3, 3, 7], [1, 1, 0])
    with pytest.raises(ValueError, match="1 of 2 groups have one"):
        obj.check_group_sizes([3, 3, 7])


def test_ids_decide_and_nothing_else():
    """Same prompt, two groups; two workers, one task."""
    close(fast.group_advantages([0.0, 0, 1, 1], [0, 0, 1, 1], kind="mean"), [0, 0, 0, 0])
    close(fast.group_advantages([1.0, 0.0], [5, 5], kind="mean"), [0.5, -0.5])


def test_groups_need_not_be_adjacent():
    got = fast.group_advantages([1.0, 10.0, 3.0, 14.0], [0, 1, 0, 1], kind="mean")
    close(got, [-1.0, -2.0, 1.0, 2.0])
    one_baseline = fast.group_advantages([1.0, 10.0, 3.0, 14.0], [0, 0, 0, 0], kind="mean")
    close(one_baseline, np.array([1.0, 10, 3, 14]) - 7)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_equals_the_loop_in_any_order(seed):
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.array([4, 4, 4, 9, 9, -1, -1, -1, -1, 1000000, 1000000, 7])).reshape(3, 4)
    rewards = rng.choice([0.0, 0.1, 1.0], size=(3, 4)).astype(np.float32)
    order = rng.permutation(12)
    for kind in KINDS:
        expected = np.zeros((3, 4))
        for place in np.ndindex(3, 4):
            r = rewards[ids == ids[place]].astype(np.float64)
            own = float(rewards[place])
            if r.size == 1:
                expected[place] = own
            elif r.max() > r.min():
                others = (r.sum() - own) / (r.size - 1)
                expected[place] = {
                    "grpo": (own - r.mean()) / (r.std() + 1e-6),
                    "dr_grpo": own - r.mean(),
                    "mean": own - r.mean(),
                    "rloo": own - others,
                }[kind]
        got = np.asarray(fast.group_advantages(rewards, ids, kind=kind))
        close(got, expected)
        shuffled = fast.group_advantages(
            rewards.ravel()[order].reshape(3, 4), ids.ravel()[order].reshape(3, 4), kind=kind
        )
        close(np.asarray(shuffled).ravel(), got.ravel()[order])


def test_masked_rows_take_no_part():
    got = fast.group_advantages([1.0, 3.0, np.nan, 9.0], [0, 0, 0, 1], kind="mean", mask=[1, 1, 0, 0])
    close(got, [-1, 1, 0, 0])


def test_number_of_groups_is_not_static():
    counted = jax.jit(lambda r, g: fast.group_advantages(r, g))
    for ids in ([0, 0, 0, 0], [0, 0, 1, 1], [-5, 70000, -5, 70000]):
        counted(jnp.zeros(4), jnp.array(ids))
    assert counted._cache_size() == 1


def test_wrong_inputs_are_refused():
    with pytest.raises(ValueError, match="grpo, dr_grpo, rloo, mean"):
        obj.group_advantages(np.zeros(2), np.zeros(2, int), kind="gspo")
    with pytest.raises(AssertionError):
        obj.group_advantages(np.zeros(2), np.zeros(3, int))
    with pytest.raises(AssertionError):
        obj.group_advantages(np.zeros(2), np.zeros(2))


@pytest.mark.parametrize("check_vma", [True, False])
def test_groups_spread_over_devices(check_vma):
    rewards, ids = np.array([1.0, 10.0, 3.0, 14.0]), np.array([0, 1, 0, 1])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    mapped = jax.shard_map(
        functools.partial(fast.group_advantages, kind="mean", axis_name="data"),
        mesh=mesh,
        in_specs=(jax.P("data"), jax.P("data")),
        out_specs=jax.P("data"),
        check_vma=check_vma,
    )
    close(jax.jit(mapped)(rewards, ids), [-1, -2, 1, 2])
