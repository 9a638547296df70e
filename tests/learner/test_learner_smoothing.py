"""How far the policy moves (KL), and how advantages are standardised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
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

import sao_jax as sao
from sao_jax.data.rows import stack_rows
from sao_jax.learner.objective import Choices


@pytest.fixture(scope="module")
def smooth_learner():
    return make_learner(Choices(baseline="given", kl="smooth"))


@pytest.fixture(scope="module")
def penalty_learner():
    return make_learner(Choices(baseline="given", kl="penalty"))


def on_policy_rows(learner, seed, noise=0.0):
    rows = random_rows(seed, 8)
    logp = policy_logp(learner.start["policy"], rows)
    rng = np.random.default_rng(seed)
    for row, now in zip(rows, logp, strict=True):
        recorded = now + noise * rng.normal(size=now.shape)
        row["rollout_logp"] = np.where(row["action_mask"], recorded, 0.0).astype(np.float32)
    return rows


def kl_of(policy, rows):
    """k3 of KL(rollout || policy), mean over action tokens."""
    batch = stack_rows(rows)
    d = np.clip(policy_logp(policy, rows) - batch["rollout_logp"], -20, 20)[batch["action_mask"]]
    return float(np.mean(np.expm1(d.astype(np.float64)) - d))


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("lr", [0.02, 0.3, 10.0])
def test_smoothing_keeps_the_divergence_at_the_target(smooth_learner, lr, noise):
    learner = restart(smooth_learner, lr=lr, kl_target=1e-3)
    rows = on_policy_rows(learner, 0, noise)
    bound = max(1e-3, kl_of(learner.state["policy"], rows))
    metrics = {k: float(v) for k, v in put_all(learner, rows).update().items()}
    assert metrics["kl_before"] == pytest.approx(kl_of(learner.start["policy"], rows), abs=1e-5)
    assert metrics["kl_after"] == pytest.approx(kl_of(learner.state["policy"], rows), rel=1e-3, abs=1e-5)
    assert metrics["kl_after"] <= bound * (1 + 1e-5)
    assert metrics["smooth_fraction"] in (0.0, 0.125, 0.25, 0.5, 1.0)
    assert learner.version == 1, "a shortened step is a step"
    if lr == 10.0:
        assert metrics["smooth_fraction"] < 1
    if metrics["smooth_fraction"] == 0:
        np.testing.assert_array_equal(host(learner.state["policy"]["embed"]), host(learner.start["policy"]["embed"]))


def test_a_step_within_the_target_is_taken_whole(smooth_learner):
    learner = restart(smooth_learner, lr=1e-4, kl_target=0.05)
    metrics = put_all(learner, on_policy_rows(learner, 1)).update()
    assert float(metrics["smooth_fraction"]) == 1
    assert float(metrics["kl_after"]) == pytest.approx(
        kl_of(learner.state["policy"], on_policy_rows(learner, 1)), rel=1e-3
    )


def test_the_divergence_is_over_the_rows_of_this_batch_only(smooth_learner):
    """Rows of an earlier, larger batch are still in the buffer."""
    learner = restart(smooth_learner, lr=1e-4, kl_target=0.05)
    put_all(learner, random_rows(2, 8)).update()
    rows = random_rows(3, 3)
    metrics = put_all(learner, rows).update()
    assert float(metrics["kl_after"]) == pytest.approx(kl_of(learner.state["policy"], rows), rel=1e-3)


def test_the_divergence_after_a_step_is_known_with_a_penalty_too(penalty_learner):
    learner = restart(penalty_learner, lr=0.3, kl_target=0.05)
    rows = on_policy_rows(learner, 6)
    metrics = put_all(learner, rows).update()
    assert float(metrics["kl_before"]) == pytest.approx(0.0, abs=1e-5)
    assert float(metrics["kl_after"]) == pytest.approx(kl_of(learner.state["policy"], rows), rel=1e-3)
    assert float(metrics["kl_after"]) > 1e-3


def test_penalty_coefficient_rises_above_the_target_and_never_falls_below_zero(penalty_learner):
    learner = restart(penalty_learner, lr=0.0, kl_target=0.05, kl_step=0.5)
    assert float(learner.state["kl_coef"]) == 0
    stale = on_policy_rows(learner, 4, noise=0.8)
    kl = kl_of(learner.start["policy"], stale)
    assert kl > 0.05
    for n in (1, 2):
        metrics = put_all(learner, stale).update()
        assert float(learner.state["kl_coef"]) == pytest.approx(0.5 * n * (kl - 0.05), rel=1e-3)
    assert float(metrics["kl_coef"]) == pytest.approx(float(learner.state["kl_coef"]))
    for _ in range(60):
        put_all(learner, on_policy_rows(learner, 5)).update()
    assert float(learner.state["kl_coef"]) == 0


def test_penalty_pulls_the_policy_towards_the_sampler(penalty_learner):
    learner = restart(penalty_learner, lr=1e-4, kl_target=1e-3, kl_step=100.0, adam_b1=0.0)
    rows = on_policy_rows(learner, 6, noise=0.8)
    for row in rows:
        row["advantage"] = np.float32(0)
    put_all(learner, rows).update()  # coefficient 0: nothing moves
    np.testing.assert_array_equal(host(learner.state["policy"]["embed"]), host(learner.start["policy"]["embed"]))
    before = kl_of(learner.state["policy"], rows)
    put_all(learner, rows).update()
    assert kl_of(learner.state["policy"], rows) < before - 1e-3


# -- whitening ---------------------------------------------------------------------------------------------------------

VALUES = dict(gamma=0.9, lr=0.05, critic_lr=0.05)


def raw_advantages(learner, rows):
    """Advantages of the unwhitened objective, from the learner's own critic."""
    plain = restart(learner, **VALUES)
    put_all(plain, rows).accumulate()
    return host(plain._buffer["advantages"])[:, : -(-len(rows) // plain.layout.devices)]


def test_batch_whitening_is_that_of_the_whole_batch():
    learner = make_learner(Choices(kl="off", whiten="batch", critic_passes=1), devices=2, **VALUES)
    rows = random_rows(7, 7)
    raw = raw_advantages(learner, rows)
    mask = host(learner._buffer["action_mask"])[:, :4].copy()
    mask[1, 3] = False  # the eighth place is empty
    restart(learner, **VALUES)
    put_all(learner, rows)
    learner.accumulate()
    assert all(np.all(g == 0) for g in jax.tree.leaves(gradients(learner))), "the policy waits for the boundary"
    metrics = learner.update()
    whitened = host(learner._buffer["advantages"])[:, :4]
    expected = np.asarray(sao.whiten(raw, mask))
    assert_close(whitened[mask], expected[mask])
    assert whitened[mask].mean() == pytest.approx(0, abs=1e-5)
    assert whitened[mask].std() == pytest.approx(1, abs=1e-3)
    assert float(metrics["policy_count"]) == mask.sum()
    assert float(metrics["policy_grad_norm"]) > 0


def test_running_whitening_uses_moments_of_earlier_updates():
    learner = make_learner(Choices(kl="off", whiten="running", critic_passes=1), **VALUES)
    rows = random_rows(8, 8)
    learner = restart(learner, **VALUES)
    put_all(learner, rows).accumulate()
    raw, mask = host(learner._buffer["advantages"])[0], stack_rows(rows)["action_mask"]
    sums = metric_sums(learner)
    assert raw[mask].sum() == pytest.approx(sums["advantage"], rel=1e-4), "mean 0, spread 1: the first are raw"
    learner.update()
    mean, square = 0.1 * raw[mask].mean(), 0.9 + 0.1 * np.square(raw[mask]).mean()
    assert float(learner.state["adv_mean"]) == pytest.approx(mean, rel=1e-4)
    assert float(learner.state["adv_sq"]) == pytest.approx(square, rel=1e-4)
    learner.state["critic"] = jax.tree.map(jnp.copy, learner.start["critic"])
    put_all(learner, rows).accumulate()
    expected = np.where(mask, (raw - mean) / np.sqrt(square - mean**2), 0.0)
    assert_close(host(learner._buffer["advantages"])[0], expected, 1e-4)
