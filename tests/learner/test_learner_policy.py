"""The policy's update against a reference that is written out here, for every loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    MODEL,
    assert_close,
    gradients,
    host,
    make_learner,
    metric_sums,
    policy_logp,
    put_all,
    quick_compile,  # noqa: F401
    random_rows,
    restart,
)

from sao_jax.data.rows import stack_rows
from sao_jax.learner.objective import Choices, Numbers
from sao_jax.learner.programs import adam, divide, optimizer_step
from sao_jax.models.decoder import bind
from sao_jax.models.logprobs import next_token_logprobs
from sao_jax.objectives import importance_weights, neighbours, policy_loss

LOW, HIGH, DUAL = 0.6, 1.7, 3.0
NUMBERS = dict(band_low=LOW, band_high=HIGH, dual_clip=DUAL, lr=0.05, adam_eps=1e-3, grad_clip=0.5)
OBJECTIVES = {
    "clip": dict(outside="clip"),
    "mask": dict(outside="mask", denominator="kept"),
    "mask_sign": dict(outside="mask_sign"),
    "ppo": dict(policy_loss="ppo", dual_clip=True),
    "tis": dict(policy_loss="tis"),
}


@functools.cache
def learner_of(name):
    """All share one shape; a given baseline leaves out the critic's programs."""
    return make_learner(Choices(baseline="given", kl="off", **OBJECTIVES[name]))


@pytest.fixture(params=OBJECTIVES)
def learner(request):
    return restart(learner_of(request.param), **NUMBERS)


def rows_with_ratios(seed=3, spread=1.0):
    """Rows whose recorded log-probs lie around those of the starting policy, on both sides of the band."""
    rows = random_rows(seed, 8)
    logp = policy_logp(learner_of("clip").start["policy"], rows)
    rng = np.random.default_rng(seed)
    for row, now in zip(rows, logp, strict=True):
        noise = spread * rng.normal(size=now.shape)
        row["rollout_logp"] = np.where(row["action_mask"], now - noise, 0.0).astype(np.float32)
    return rows


def coefficients(name, ratio, advantage):
    """d loss / d logp of one token, by the definitions; and whether the token counts."""
    if name == "clip":
        return -min(max(ratio, LOW), HIGH) * advantage, True
    if name == "mask":
        kept = LOW < ratio < HIGH
        return (-ratio * advantage if kept else 0.0), kept
    if name == "mask_sign":
        dropped = (ratio >= HIGH and advantage > 0) or (ratio <= LOW and advantage < 0)
        return (0.0 if dropped else -ratio * advantage), True
    if name == "tis":
        return -min(ratio, HIGH) * advantage, True
    clipped = (ratio > HIGH and advantage > 0) or (ratio < LOW and advantage < 0) or (ratio > DUAL and advantage < 0)
    return (0.0 if clipped else -ratio * advantage), True


def reference_gradient(name, policy, rows):
    """sum_t c_t dlogp_t / count, with the c_t found in a loop."""
    batch, policy = stack_rows(rows), host(policy)
    logp = policy_logp(policy, rows)
    weight, count = np.zeros_like(logp), 0
    for i, t in zip(*np.nonzero(batch["action_mask"]), strict=True):
        ratio = np.exp(logp[i, t] - batch["rollout_logp"][i, t])
        weight[i, t], counts = coefficients(name, ratio, batch["advantage"][i])
        count += counts

    @jax.jit
    def weighted(policy, tokens, temperature, weight):
        model = bind(MODEL, policy)
        return jnp.sum(weight * next_token_logprobs(model(tokens), model.head(), tokens, temperature)[0])

    gradient = jax.grad(weighted)(policy, batch["tokens"], batch["temperature"], weight)
    return jax.tree.map(lambda g: np.asarray(g) / count, gradient), count, weight


def name_of(learner):
    return next(name for name in OBJECTIVES if learner is learner_of(name))


def test_gradient_is_that_of_the_definition(learner):
    rows = rows_with_ratios()
    expected, count, weight = reference_gradient(name_of(learner), learner.state["policy"], rows)
    put_all(learner, rows).accumulate()
    sums = metric_sums(learner)
    assert sums["policy_count"] == count
    assert sums["low"] > 0, "no token below the band"
    assert sums["high"] > 0, "no token above the band"
    assert np.abs(weight).max() > 0
    assert_close(jax.tree.map(lambda g: g / count, gradients(learner)), expected)


def test_parameters_after_the_update_are_those_of_clipped_adam(learner):
    rows = rows_with_ratios()
    before = host(learner.state["policy"])
    gradient, *_ = reference_gradient(name_of(learner), before, rows)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradient)))
    assert norm > NUMBERS["grad_clip"], "nothing to clip"
    metrics = put_all(learner, rows).update()
    assert float(metrics["policy_grad_norm"]) == pytest.approx(norm, rel=1e-4)

    def first_step(p, g):
        g = g * NUMBERS["grad_clip"] / norm
        return p - NUMBERS["lr"] * g / (np.abs(g) + NUMBERS["adam_eps"])

    assert_close(host(learner.state["policy"]), jax.tree.map(first_step, before, gradient), 1e-4)
    assert learner.version == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_the_penalty_is_divided_by_its_own_count_of_tokens(devices):
    """Most tokens fall out of the band; the divergence is over all of them."""
    coefficient, numbers = 0.7, NUMBERS | {"grad_clip": 1e9}
    choices = Choices(baseline="given", kl="penalty", outside="mask", denominator="kept")
    learner = restart(make_learner(choices, devices=devices), **numbers)
    learner.state["kl_coef"] = jnp.full_like(learner.state["kl_coef"], coefficient)
    rows = rows_with_ratios(seed=4)
    policy, batch = host(learner.state["policy"]), stack_rows(rows)
    loss, kept, _ = reference_gradient("mask", policy, rows)
    mask, tokens = batch["action_mask"], int(batch["action_mask"].sum())
    assert 0 < kept < 0.8 * tokens

    @jax.jit
    def divergence(policy):
        model = bind(MODEL, policy)
        logp = next_token_logprobs(model(batch["tokens"]), model.head(), batch["tokens"], batch["temperature"])[0]
        d = logp - batch["rollout_logp"]
        return jnp.sum(jnp.where(mask, jnp.expm1(d) - d, 0.0)) / tokens

    expected = jax.tree.map(lambda a, b: a + coefficient * np.asarray(b), loss, jax.grad(divergence)(policy))
    metrics = put_all(learner, rows).update()
    assert float(metrics["policy_count"]) == kept
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(expected)))
    assert float(metrics["policy_grad_norm"]) == pytest.approx(norm, rel=1e-4)
    # After one step Adam's mean of gradients is a tenth of this one.
    assert_close(jax.tree.map(lambda m: m / 0.1, host(learner.state["policy_opt"].mu)), expected, 1e-4)
    assert all(np.all(g == 0) for g in jax.tree.leaves(host(learner._totals["penalty"])))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["clip", "ppo", "tis"])
def test_good_actions_become_likelier_and_bad_ones_less_likely(name, sign):
    learner = restart(learner_of(name), **NUMBERS | {"lr": 1e-3})
    rows = random_rows(5, 8)
    logp = policy_logp(learner.state["policy"], rows)
    for row, now in zip(rows, logp, strict=True):
        row["advantage"] = np.float32(sign)
        row["rollout_logp"] = np.where(row["action_mask"], now, 0.0).astype(np.float32)
    put_all(learner, rows).update()
    moved = policy_logp(learner.state["policy"], rows) - logp
    mask = stack_rows(rows)["action_mask"]
    assert sign * moved[mask].mean() > 1e-4


def test_the_ratio_is_against_the_recorded_log_probs():
    learner = restart(learner_of("clip"), **NUMBERS)
    rows = random_rows(6, 4)
    logp = policy_logp(learner.state["policy"], rows)
    for row, now in zip(rows, logp, strict=True):
        row["rollout_logp"] = np.where(row["action_mask"], now - 1.0, 0.0).astype(np.float32)
    put_all(learner, rows).accumulate()
    sums = metric_sums(learner)
    assert sums["ratio"] / sums["tokens"] == pytest.approx(np.e, rel=1e-4)
    assert sums["high"] == sums["tokens"]
    assert sums["logp_abs_diff"] / sums["tokens"] == pytest.approx(1.0, rel=1e-4)


def test_a_given_advantage_stands_at_action_tokens_only():
    learner = restart(learner_of("clip"), **NUMBERS)
    rows = random_rows(7, 5)
    put_all(learner, rows).accumulate()
    stored = host(learner._buffer["advantages"])[0]
    for n, row in enumerate(rows):
        np.testing.assert_array_equal(stored[n], np.where(row["action_mask"], row["advantage"], 0.0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_finite_log_probs_adds_exactly_nothing_to_the_gradient(learner, bad):
    rows = rows_with_ratios(seed=8)[:3]
    put_all(learner, rows[:2]).accumulate()  # a window of two rows
    expected = gradients(learner)
    spoilt = rows[2] | {"rollout_logp": np.where(rows[2]["action_mask"], bad, 0.0).astype(np.float32)}
    learner.put(spoilt)
    learner.accumulate()
    jax.tree.map(np.testing.assert_array_equal, gradients(learner), expected)
    sums = metric_sums(learner)
    assert sums["nonfinite"] == spoilt["action_mask"].sum()
    assert sums["skipped"] == 0
    assert all(np.isfinite(value) for value in sums.values())


def test_a_window_with_a_gradient_that_is_not_finite_is_skipped_and_counted():
    learner = restart(learner_of("tis"), **NUMBERS)
    rows = rows_with_ratios(seed=9)
    learner.put(rows[0])
    learner.put(rows[1])
    learner.put(rows[2] | {"advantage": np.float32(np.inf)})
    learner.put(rows[3])
    learner.put(rows[4])
    metrics = learner.update()
    assert (float(metrics["windows"]), float(metrics["skipped"])) == (3, 1)
    left = [rows[0], rows[1], rows[4]]
    assert float(metrics["policy_count"]) == sum(int(row["action_mask"].sum()) for row in left)
    after = host(learner.state)
    put_all(restart(learner, **NUMBERS), left).update()
    assert_close(after["policy"], host(learner.state["policy"]))


def test_the_update_after_a_skipped_one_starts_from_zero():
    learner = restart(learner_of("tis"), **NUMBERS)
    rows = rows_with_ratios(seed=10)
    learner.put(rows[0] | {"advantage": np.float32(np.nan)})
    metrics = learner.update()
    assert float(metrics["skipped"]) == 1
    assert float(metrics["policy_grad_norm"]) == 0
    jax.tree.map(np.testing.assert_array_equal, host(learner.state["policy"]), host(learner.start["policy"]))
    put_all(learner, rows[1:3]).accumulate()
    expected = reference_gradient("tis", learner.start["policy"], rows[1:3])
    assert_close(jax.tree.map(lambda g: g / expected[1], gradients(learner)), expected[0])


def test_gradients_are_averaged_before_they_are_clipped():
    numbers = Numbers(grad_clip=1.0, adam_b1=0.0).traced()
    micro = [jnp.array([3.0, 0.0]), jnp.array([0.0, 4.0])]
    params = {"w": jnp.zeros(2)}
    mean = divide({"w": micro[0] + micro[1]}, 2.0)
    _, state, norm = optimizer_step(params, adam(0.0, 0.999, 1e-8).init(params), mean, numbers)
    assert float(norm) == pytest.approx(2.5)
    np.testing.assert_allclose(state.mu["w"], [0.6, 0.8], rtol=1e-6)  # with b1 = 0 the clipped gradient itself


def test_one_window_or_many_are_clipped_alike():
    learner = restart(learner_of("clip"), **NUMBERS)
    rows = rows_with_ratios(seed=11)
    norms, states = [], []
    for pauses in (set(), {1, 2, 3, 4, 5, 6, 7}):
        restart(learner, **NUMBERS)
        for n, row in enumerate(rows, start=1):
            learner.put(row)
            if n in pauses:
                learner.accumulate()
        norms.append(float(learner.update()["policy_grad_norm"]))
        states.append(host(learner.state["policy"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_close(states[0], states[1], 1e-4)


def test_calls_out_of_order_are_refused():
    learner = restart(learner_of("clip"), **NUMBERS)
    with pytest.raises(RuntimeError, match="at least one trajectory"):
        learner.update()
    put_all(learner, random_rows(12, 8))
    with pytest.raises(RuntimeError, match="full"):
        learner.put(random_rows(13, 1)[0])
    with pytest.raises(RuntimeError, match="empty batch"):
        learner.score([random_rows(13, 1)])
    with pytest.raises(ValueError, match="2 devices, the mesh has 1"):
        type(learner)(
            MODEL, learner.choices, Numbers(), type(learner.layout).fit(8, 12, 2), learner.mesh, learner.start["policy"]
        )


# -- neighbours --------------------------------------------------------------------------------------------------------


def neighbour_loss(name, logp, row):
    mu, mask, advantage = row["rollout_logp"], row["action_mask"], jnp.full(logp.shape, row["advantage"])
    if name == "gspo":
        return neighbours.gspo_loss(logp, mu, advantage, mask, low=LOW, high=HIGH)
    if name == "a3po":
        proximal = neighbours.interpolated_logp(logp, mu, row["staleness"])
        return neighbours.decoupled_ppo_loss(logp, proximal, mu, advantage, mask, low=LOW, high=HIGH)
    weights = importance_weights(logp, mu, low=LOW, high=HIGH, outside="mask")
    weights *= neighbours.sequence_mask(logp, mu, mask, delta=SEQUENCE_KL)
    return policy_loss(logp, weights, advantage, mask)


SEQUENCE_KL = 0.5
NEIGHBOURS = {
    "gspo": Choices(policy_loss="gspo", baseline="given", kl="off"),
    "a3po": Choices(policy_loss="a3po", baseline="given", kl="off"),
    "sequence": Choices(outside="mask", sequence_mask=True, baseline="given", kl="off"),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_neighbours_gradient_is_that_of_its_function(name):
    learner = restart(make_learner(NEIGHBOURS[name]), **NUMBERS | {"sequence_kl": SEQUENCE_KL})
    rows = rows_with_ratios()
    for age, row in enumerate(rows):
        row["staleness"] = np.float32(age)
    policy = host(learner.state["policy"])
    batch = stack_rows(rows)

    @jax.jit
    def loss(policy):
        model = bind(MODEL, policy)
        logp, _ = next_token_logprobs(model(batch["tokens"]), model.head(), batch["tokens"], batch["temperature"])
        totals, counts = jax.vmap(lambda p, row: neighbour_loss(name, p, row))(logp, batch)
        return totals.sum() / counts.sum()

    put_all(learner, rows).accumulate()
    count = metric_sums(learner)["policy_count"]
    got = jax.tree.map(lambda g: g / count, gradients(learner))
    assert max(np.abs(g).max() for g in jax.tree.leaves(got)) > 1e-3
    assert_close(got, host(jax.grad(loss)(policy)))
    if name == "sequence":
        near = [
            float(neighbours.sequence_mask(p, r["rollout_logp"], r["action_mask"], delta=SEQUENCE_KL))
            for p, r in zip(policy_logp(policy, rows), rows, strict=True)
        ]
        assert 0 < sum(near) < len(near), "every sequence, or none, is near"
