"""GAE over action tokens, segments, corrected returns, lambda: hand values, a loop as reference, limits, gradients."""

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
random_inputs = functools.partial(settings, max_examples=25, deadline=None)
seeds = st.integers(0, 2**32 - 1)
T = 12


def loop(rewards, values, mask, discount, lambda_, bootstrap=0.0, weights=None, segments=None, packs=None):
    """The recursion as it is written down, token by token; bootstrap [T] is read at a pack's last action token."""
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    bootstrap = np.broadcast_to(bootstrap, rewards.shape)
    out, following = np.zeros(len(rewards)), None
    for t in reversed(range(len(rewards))):
        if not mask[t] or (packs is not None and packs[t] == 0):
            continue
        same_pack = following is not None and (packs is None or (packs[t : following + 1] == packs[t]).all())
        if same_pack:
            acc, nxt = out[following], values[following]
            if segments is not None and segments[t] != segments[following]:
                acc = 0.0
        else:
            acc, nxt = 0.0, bootstrap[t]
        weight = 1.0 if weights is None else weights[t]
        out[t] = weight * (rewards[t] + discount * nxt - values[t] + discount * lambda_ * acc)
        following = t
    return out


def draw(seed, density=None):
    """One random trajectory with garbage wherever nothing may be read."""
    rng = np.random.default_rng(seed)
    mask = rng.random(T) < (density or rng.choice([0.2, 0.6, 1.0]))
    rewards, values, weights = (rng.normal(size=T).astype(np.float32) for _ in range(3))
    garbage = np.array([np.nan, np.inf, -np.inf, 1e30], np.float32)
    for x in (rewards, values, weights):
        x[~mask] = rng.choice(garbage, size=(~mask).sum())
    segments = np.sort(rng.integers(0, 4, T)).astype(np.int32)
    discount, lambda_, bootstrap = rng.random(), rng.random(), rng.normal()
    return rewards, values, mask, weights, segments, np.float32(discount), np.float32(lambda_), np.float32(bootstrap)


# Hand values


def test_observations_are_one_step():
    mask = [1, 1, 0, 0, 0, 1, 1, 1]
    values = [0.1, 0.2, 7.0, 8.0, 9.0, 0.4, 0.5, 0.6]
    advantages, returns = fast.gae([0.0] * 7 + [1.0], values, mask, discount=0.99, lambda_=0.9)
    close(advantages, [0.666644, 0.638209, 0, 0, 0, 0.496306, 0.4504, 0.4])
    close(returns, np.where(mask, np.asarray(advantages) + values, 0))
    assert advantages.dtype == returns.dtype == jnp.float32


def test_segments_independent_and_carried():
    nan = np.nan
    rewards = [0, 0, 0, 0.2, 0, 0, 0, 1.0, 0]
    values = [0.1, 0.2, nan, 0.3, nan, nan, 0.4, 0.5, nan]
    mask, segments = [1, 1, 0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 2, 2, 2]
    estimate = functools.partial(fast.segmented_gae, rewards, values, mask, discount=0.9, lambda_=0.8)
    carried, _ = estimate(segment_ids=segments, mode="carried")
    independent, returns = estimate(segment_ids=segments, mode="independent")
    close(carried, [0.418216, 0.469744, 0, 0.5552, 0, 0, 0.41, 0.5, 0])
    close(carried, fast.gae(rewards, values, mask, discount=0.9, lambda_=0.8)[0])
    close(independent, [0.1304, 0.07, 0, 0.26, 0, 0, 0.41, 0.5, 0])
    close(returns, [0.2304, 0.27, 0, 0.56, 0, 0, 0.81, 1.0, 0])
    close(estimate(segment_ids=segments)[0], independent)


def test_segment_without_an_action_is_passed_over():
    """The bootstrap comes from the next segment that has an action token, not from the next segment."""
    values = [0.5, 9.0, 9.0, 0.7]
    advantages, _ = fast.segmented_gae(
        [0.0] * 4, values, [1, 0, 0, 1], discount=1.0, lambda_=1.0, segment_ids=[0, 1, 1, 2], bootstrap_value=0.2
    )
    close(advantages, [0.2, 0, 0, -0.5])


@pytest.mark.parametrize(
    ("bootstrap", "advantages", "returns"),
    [(0.8, [1.8104, 1.32], [2.3104, 1.72]), (0.0, [1.292, 0.6], [1.792, 1.0])],
    ids=["truncated", "terminated"],
)
def test_cut_adds_the_value_of_what_follows_and_an_end_adds_nothing(bootstrap, advantages, returns):
    got = fast.gae([1.0, 1.0], [0.5, 0.4], [1, 1], discount=0.9, lambda_=0.8, bootstrap_value=bootstrap)
    close(got[0], advantages)
    close(got[1], returns)


def test_two_terminated_episodes_in_one_stream():
    rewards, values = [0.0, 1.0, 0.0, 2.0], [0.5, 0.6, 0.7, 0.8]
    expected = [0.382, 0.4, 1.046, 1.2]
    estimate = functools.partial(fast.gae, discount=0.9, lambda_=0.95)
    close(estimate(rewards, values, [1] * 4, pack_ids=[1, 1, 2, 2])[0], expected)
    alone = [estimate(rewards[i : i + 2], values[i : i + 2], [1, 1])[0] for i in (0, 2)]
    close(np.concatenate(alone), expected)


def test_cut_inside_a_stream_bootstraps_from_its_own_successor():
    """After an automatic reset the row's next value belongs to the new episode; the successor's is given apart."""
    advantages, _ = fast.gae(
        [0.0] * 4,
        [1.0, 2.0, 5.0, 6.0],
        [1] * 4,
        discount=0.9,
        lambda_=0.5,
        bootstrap_value=[2.0, 3.0, 6.0, 7.0],
        pack_ids=[1, 1, 2, 2],
    )
    close(advantages, [1.115, 0.7, 0.535, 0.3])


def test_value_at_padding_is_never_a_successor():
    for padding in (40.0, -3.0, np.nan):
        advantages, returns = fast.gae([0, 1, 0], [0.5, 0.25, padding], [1, 1, 0], discount=0.9, lambda_=0.8)
        close(advantages, [0.265, 0.75, 0.0])
        close(returns, [0.765, 1.0, 0.0])


def test_reward_to_go_crosses_observations_at_one_step_each():
    _, returns = fast.gae([0, 0, 0, 2.0], [0.0] * 4, [1, 0, 0, 1], discount=0.8, lambda_=1.0)
    close(returns, [1.6, 0, 0, 2.0])


def test_padding_side_and_gaps_do_not_matter():
    rewards, values = np.array([0.3, 0.0, 1.0]), np.array([0.5, 0.1, 0.2])
    expected, _ = fast.gae(rewards, values, [1, 1, 1], discount=0.9, lambda_=0.8, bootstrap_value=0.7)
    for mask in ([0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1]):
        mask = np.array(mask, bool)
        spread = np.full((2, 5), 99.0)
        spread[0, mask], spread[1, mask] = rewards, values
        advantages, _ = fast.gae(*spread, mask, discount=0.9, lambda_=0.8, bootstrap_value=0.7)
        close(np.asarray(advantages)[mask], expected)


def test_packed_trajectories_with_padding():
    advantages, returns = fast.gae(
        [0, 1, 0, 2, 0], [0.5, 0.6, 0.7, 0.8, 99], [1] * 5, discount=0.9, lambda_=0.95, pack_ids=[1, 1, 2, 2, 0]
    )
    close(advantages, [0.382, 0.4, 1.046, 1.2, 0.0])
    assert returns[4] == 0


def test_zero_in_the_mask_is_no_boundary_between_packs():
    """A boundary that stands at an observation still separates, and an observation alone does not."""
    estimate = functools.partial(fast.gae, discount=1.0, lambda_=1.0)
    advantages, _ = estimate([1.0, 9, 1.0, 9, 9, 1.0], [0.0] * 6, [1, 0, 1, 0, 0, 1], pack_ids=[1, 1, 1, 1, 2, 2])
    close(advantages, [2, 0, 1, 0, 0, 1])
    # The pack in between has no action token; the packs around it must not touch all the same.
    close(estimate([1.0, 0, 1.0], [0.0] * 3, [1, 0, 1], pack_ids=[1, 2, 1])[0], [1, 0, 1])


def test_corrected_returns_by_hand():
    targets = fast.corrected_returns(
        [0, 0, 0, 0, 1.0], [0.1, 0.2, 9.0, 0.4, 0.5], [1, 1, 0, 1, 1], [1, 0.5, np.nan, 2, 1], discount=1, lambda_=1
    )
    close(targets, [0.9, 0.9, 0, 1.6, 1.0])


def test_length_adaptive_lambda_by_hand():
    close(fast.length_adaptive_lambda([0, 1, 8, 1000]), [0.0, 1 / 3, 0.916667, 0.999333])
    close(fast.length_adaptive_lambda(1, alpha=0.5), 0.0)


# Against the loop


@random_inputs()
@given(seeds)
def test_gae_and_corrected_returns_equal_the_loop(seed):
    rewards, values, mask, weights, _, discount, lambda_, bootstrap = draw(seed)
    common = {"discount": discount, "lambda_": lambda_, "bootstrap_value": bootstrap}
    expected = loop(rewards, values, mask, discount, lambda_, bootstrap)
    advantages, returns = fast.gae(rewards, values, mask, **common)
    close(advantages, expected)
    close(returns, np.where(mask, expected + np.where(mask, values, 0), 0))
    targets = fast.corrected_returns(rewards, values, mask, weights, **common)
    corrections = loop(rewards, values, mask, discount, lambda_, bootstrap, weights=weights)
    close(targets, np.where(mask, corrections + np.where(mask, values, 0), 0))


@random_inputs()
@given(seeds)
def test_segments_equal_the_loop(seed):
    rewards, values, mask, _, segments, discount, lambda_, bootstrap = draw(seed)
    common = {"discount": discount, "lambda_": lambda_, "segment_ids": segments, "bootstrap_value": bootstrap}
    independent, _ = fast.segmented_gae(rewards, values, mask, mode="independent", **common)
    close(independent, loop(rewards, values, mask, discount, lambda_, bootstrap, segments=segments))
    carried, _ = fast.segmented_gae(rewards, values, mask, mode="carried", **common)
    close(carried, carried_by_hand(rewards, values, mask, segments, discount, lambda_, bootstrap))


def carried_by_hand(rewards, values, mask, segments, discount, lambda_, bootstrap):
    """Independent segments first, then A_t += (discount * lambda_)^n * carried A of the next action token."""
    out = loop(rewards, values, mask, discount, lambda_, bootstrap, segments=segments)
    acting = np.flatnonzero(mask)
    for s in sorted(set(segments.tolist()), reverse=True):
        inside, later = acting[segments[acting] == s], acting[segments[acting] > s]
        for t in inside:
            if later.size:
                out[t] += (discount * lambda_) ** (inside >= t).sum() * out[later[0]]
    return out


@random_inputs()
@given(seeds)
def test_packed_row_equals_its_trajectories_alone(seed):
    rewards, values, mask, _, segments, discount, lambda_, _ = draw(seed)
    rng = np.random.default_rng(seed)
    packs = np.repeat([1, 2, 0], [4, 5, 3]).astype(np.int32)
    bootstrap = rng.normal(size=T).astype(np.float32)
    kw = {"discount": discount, "lambda_": lambda_, "bootstrap_value": bootstrap, "pack_ids": packs}
    got = fast.gae(rewards, values, mask, **kw)[0]
    close(got, loop(rewards, values, mask, discount, lambda_, bootstrap, packs=packs))
    seamed = fast.segmented_gae(rewards, values, mask, segment_ids=segments, mode="independent", **kw)[0]
    close(seamed, loop(rewards, values, mask, discount, lambda_, bootstrap, segments=segments, packs=packs))
    for where in (slice(0, 4), slice(4, 9)):
        last = np.flatnonzero(mask[where])
        value = bootstrap[where][last[-1]] if last.size else 0.0
        close(got[where], loop(rewards[where], values[where], mask[where], discount, lambda_, value))
    assert (np.asarray(got)[9:] == 0).all()


# Limits


@random_inputs(max_examples=10)
@given(seeds)
def test_without_observations_it_is_plain_gae(seed):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=T), rng.normal(size=T)
    deltas = rewards + 0.9 * np.append(values[1:], 0.3) - values
    expected = [sum((0.9 * 0.8) ** k * deltas[t + k] for k in range(T - t)) for t in range(T)]
    close(fast.gae(rewards, values, np.ones(T, bool), discount=0.9, lambda_=0.8, bootstrap_value=0.3)[0], expected)


@random_inputs(max_examples=10)
@given(seeds)
def test_lambda_one_is_monte_carlo_and_lambda_zero_is_one_step(seed):
    rewards, values, mask, _, segments, discount, _, bootstrap = draw(seed)
    acting = np.flatnonzero(mask)
    kw = {"discount": discount, "bootstrap_value": bootstrap}
    _, returns = fast.gae(rewards, values, mask, lambda_=1.0, **kw)
    advantages, _ = fast.gae(rewards, values, mask, lambda_=0.0, **kw)
    following = np.append(values[acting[1:]], bootstrap)
    monte_carlo = [
        sum(discount**k * rewards[u] for k, u in enumerate(acting[i:])) + discount ** (len(acting) - i) * bootstrap
        for i in range(len(acting))
    ]
    close(np.asarray(returns)[acting], monte_carlo, rtol=1e-4, atol=1e-5)
    close(np.asarray(advantages)[acting], rewards[acting] + discount * following - values[acting])
    # With lambda 0 nothing is carried, so seams make no difference.
    for mode in ("independent", "carried"):
        kw_segments = {"segment_ids": segments, "mode": mode, "lambda_": 0.0}
        close(fast.segmented_gae(rewards, values, mask, **kw_segments, **kw)[0], advantages)


@random_inputs(max_examples=10)
@given(seeds)
def test_weights_of_one_give_lambda_returns_and_of_zero_the_values(seed):
    rewards, values, mask, _, _, discount, lambda_, bootstrap = draw(seed)
    kw = {"discount": discount, "lambda_": lambda_, "bootstrap_value": bootstrap}
    _, returns = fast.gae(rewards, values, mask, **kw)
    close(fast.corrected_returns(rewards, values, mask, np.ones(T, np.float32), **kw), returns)
    close(fast.corrected_returns(rewards, values, mask, np.zeros(T, np.float32), **kw), np.where(mask, values, 0))
    one = np.zeros(T, np.int32)
    for mode in ("independent", "carried"):
        close(fast.segmented_gae(rewards, values, mask, segment_ids=one, mode=mode, **kw)[1], returns)


# Transformations


def test_gradients_ignore_what_is_not_read():
    rewards, values, mask, weights, segments, discount, lambda_, bootstrap = draw(1, density=0.6)
    assert not np.isfinite(values).all()
    assert mask.any()

    def total(rewards, values, discount, lambda_, bootstrap):
        kw = {"discount": discount, "lambda_": lambda_, "bootstrap_value": bootstrap}
        a, _ = fast.gae(rewards, values, mask, **kw)
        s, _ = fast.segmented_gae(rewards, values, mask, segment_ids=segments, **kw)
        c = fast.corrected_returns(rewards, values, mask, weights, **kw)
        p, _ = fast.gae(rewards, values, mask, pack_ids=jnp.where(jnp.arange(T) < 6, 1, 2), **kw)
        return (jnp.square(a) + jnp.square(s) + c + jnp.square(p)).sum()

    arguments = (rewards, values, discount, lambda_, bootstrap)
    gradients = jax.jit(jax.grad(total, argnums=tuple(range(5))))(*arguments)
    for g in gradients:
        assert np.isfinite(g).all()
    assert (np.asarray(gradients[0])[~mask] == 0).all()
    assert (np.asarray(gradients[1])[~mask] == 0).all()
    clean = [np.where(mask, x, 0.0) for x in arguments[:2]] + list(arguments[2:])
    for g, c in zip(gradients, jax.jit(jax.grad(total, argnums=tuple(range(5))))(*clean), strict=True):
        close(g, c)


def test_gradient_with_respect_to_a_value_by_differences():
    rewards, values = np.array([0.1, 0.0, 0.5, 1.0]), np.array([0.3, 7.0, 0.2, 0.4])
    mask = np.array([1, 0, 1, 1], bool)

    def first(values):
        return fast.gae(rewards, values, mask, discount=0.9, lambda_=0.8)[0][0]

    # dA_0/dV_0 = -1; a later value enters its own delta with weight -1 and that before it with +discount.
    decay = 0.9 * 0.8
    close(jax.jit(jax.grad(first))(values), [-1, 0, 0.9 - decay, decay * (0.9 - decay)])


def test_weights_carry_no_gradient():
    def total(weights):
        return fast.corrected_returns([0.0, 1.0], [0.5, 0.2], [1, 1], weights, discount=1.0, lambda_=1.0).sum()

    assert (jax.grad(total)(jnp.ones(2)) == 0).all()


def test_vmap_with_a_lambda_and_a_bootstrap_per_row():
    rows = [draw(seed) for seed in range(4)]
    rewards, values, mask, _, segments, _, lambda_, bootstrap = (np.stack(x) for x in zip(*rows, strict=True))

    def row(r, v, m, s, lam, b):
        return fast.segmented_gae(r, v, m, discount=0.9, lambda_=lam, segment_ids=s, bootstrap_value=b)[0]

    got = jax.jit(jax.vmap(row))(rewards, values, mask, segments, lambda_, bootstrap)
    for i in range(4):
        expected = loop(rewards[i], values[i], mask[i], 0.9, lambda_[i], bootstrap[i], segments=segments[i])
        close(got[i], expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    rewards = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def part(rewards, lambda_):
        def row(r):
            segmented = {"segment_ids": jnp.array([0, 0, 1, 1]), "pack_ids": jnp.ones(4, int)}
            kw = {"discount": 1.0, "lambda_": lambda_}
            a, _ = fast.gae(r, jnp.zeros(4), jnp.ones(4, bool), **kw)
            s, _ = fast.segmented_gae(r, jnp.zeros(4), jnp.ones(4, bool), **segmented, **kw)
            return a, s, fast.corrected_returns(r, jnp.zeros(4), jnp.ones(4, bool), r, **kw)

        return jax.vmap(row)(rewards)

    P = jax.P
    mapped = jax.shard_map(part, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma)
    for got, expected in zip(jax.jit(mapped)(rewards, 0.5), jax.jit(part)(rewards, 0.5), strict=True):
        close(got, expected)


def test_no_token_and_no_action():
    empty, _ = fast.gae(np.zeros(0), np.zeros(0), np.zeros(0, bool), discount=1.0, lambda_=1.0)
    assert empty.shape == (0,)
    advantages, returns = fast.gae([1.0, 2.0], [3.0, 4.0], [0, 0], discount=1.0, lambda_=1.0, bootstrap_value=5.0)
    assert (advantages == 0).all()
    assert (returns == 0).all()


def test_numbers_are_traced_so_a_sweep_compiles_once():
    counted = jax.jit(lambda *a, **k: obj.gae(*a, **k))
    for discount in (0.9, 0.95, 1.0):
        for lambda_ in (0.0, 1.0):
            counted(np.zeros(3), np.zeros(3), np.ones(3, bool), discount=discount, lambda_=lambda_)
    assert counted._cache_size() == 1


def test_wrong_inputs_are_refused():
    ones = np.ones(3)
    ok = {"discount": 1.0, "lambda_": 1.0}
    with pytest.raises(AssertionError):
        obj.gae(np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3)), **ok)
    with pytest.raises(AssertionError):
        obj.gae(ones, np.ones(4), ones, **ok)
    with pytest.raises(AssertionError):
        obj.gae(ones, ones, ones, bootstrap_value=ones, **ok)
    with pytest.raises(AssertionError):
        obj.segmented_gae(ones, ones, ones, segment_ids=ones, **ok)
    with pytest.raises(ValueError, match="lambda_ must be in"):
        obj.gae(ones, ones, ones, discount=1.0, lambda_=1.5)
    with pytest.raises(ValueError, match="independent, carried"):
        obj.segmented_gae(ones, ones, ones, segment_ids=[0, 0, 1], mode="carry", **ok)
    with pytest.raises(ValueError, match="alpha"):
        obj.length_adaptive_lambda(3, alpha=0.0)
