"""A trajectory cut into rows that hold its whole prefix is trained as the one row it would be."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers import (
    assert_close,
    gradients,
    host,
    make_learner,
    metric_sums,
    policy_logp,
    quick_compile,  # noqa: F401
    random_trajectory,
    restart,
)

from sao_jax.data.rows import blank_row, make_row, make_rows, stack_rows
from sao_jax.learner.objective import Choices

LENGTH = 24
NUMBERS = dict(gamma=0.9, critic_lambda=0.8, lr=0.1, critic_lr=0.1, adam_eps=1.0)
CHOICES = {
    "independent": dict(),
    "carried": dict(segments="carried"),
    "corrected": dict(critic_targets="dis"),
    "whitened": dict(whiten="batch"),
    "running": dict(whiten="running", segments="carried", value_clip=True),
    "given": dict(baseline="given"),
}


def choices_of(name):
    return Choices(**dict(kl="smooth", critic_passes=2) | CHOICES[name])


def cut(t, rng):
    """The trajectory with windows that open at random action tokens and hold the whole prefix."""
    acts = np.flatnonzero(t.action_mask)[1:]
    positions = np.sort(rng.choice(acts, size=rng.integers(0, min(5, len(acts))), replace=False))
    return dataclasses.replace(t, windows=tuple((int(p), 0, 0) for p in positions))


def trajectories(count=5, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for index in range(count):
        actions = rng.integers(1, 4, rng.integers(2, 5))
        t = random_trajectory(rng, actions=actions, end=("terminated", "truncated")[index % 2])
        rewards = np.where(t.action_mask, rng.normal(size=t.length), 0).astype(np.float32)
        found.append(cut(dataclasses.replace(t, rewards=rewards), rng))
    assert any(len(t.windows) > 1 for t in found)
    return found


def rows_of(t, number, steps):
    return make_rows(t, length=LENGTH, steps_per_segment=steps, lambda_=0.7, advantage=float(number) - 2.5)


def result(learner, batch):
    """Sums before the boundary, and the parameters after it."""
    restart(learner, **NUMBERS)
    for rows in batch:
        learner.put(*rows)
    learner.accumulate()
    sums = metric_sums(learner)
    for name in ("windows", "skipped"):
        sums.pop(name)
    parts = [gradients(learner)] + ([gradients(learner, "critic")] if learner.choices.has_critic else [])
    learner.update()
    return parts, sums, host({name: learner.state[name] for name in ("policy", "critic")})


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("steps", [1, 2])
def test_rows_with_the_whole_prefix_add_up_to_the_trajectory(name, steps):
    learner, several = learners(name)
    batch = [(n, t) for n, t in enumerate(trajectories())]
    whole = [[make_row(t, length=LENGTH, steps_per_segment=steps, lambda_=0.7, advantage=n - 2.5)] for n, t in batch]
    parts, sums, params = result(learner, whole)
    cut_parts, cut_sums, cut_params = result(several, [rows_of(t, n, steps) for n, t in batch])
    assert any(np.abs(g).max() > 1e-2 for g in jax.tree.leaves(parts))
    assert_close(cut_parts, parts)
    assert_close(cut_sums, sums)
    assert_close(cut_params, params)


LEARNERS = {}


def learners(name):
    if name not in LEARNERS:
        options = dict(length=LENGTH, batch=5, micro_rows=2)
        LEARNERS[name] = make_learner(choices_of(name), **options), make_learner(choices_of(name), most=5, **options)
    return LEARNERS[name]


@pytest.mark.parametrize(("devices", "micro_rows", "shard"), [(2, 3, False), (8, 1, True)], ids=["2", "8-sharded"])
def test_rows_of_one_trajectory_are_trained_by_all_devices(devices, micro_rows, shard):
    batch = trajectories()
    options = dict(length=LENGTH, batch=5, most=5, shard_params=shard)
    learner = make_learner(choices_of("carried"), devices=devices, micro_rows=micro_rows, **options)
    whole = [[make_row(t, length=LENGTH, steps_per_segment=1, lambda_=0.7)] for t in batch]
    parts, sums, params = result(learners("carried")[0], whole)
    cut_parts, cut_sums, cut_params = result(
        learner, [make_rows(t, length=LENGTH, steps_per_segment=1, lambda_=0.7) for t in batch]
    )
    assert_close(cut_parts, parts)
    assert_close(cut_sums, sums)
    assert_close(cut_params, params)


def test_a_gradient_call_in_between_changes_nothing():
    learner = learners("independent")[1]
    batch = [rows_of(t, n, 1) for n, t in enumerate(trajectories())]
    parts, _, params = result(learner, batch)
    restart(learner, **NUMBERS)
    for rows in batch:
        learner.put(*rows)
        learner.accumulate()
    assert_close([gradients(learner), gradients(learner, "critic")], parts)
    learner.update()
    assert_close(host({name: learner.state[name] for name in ("policy", "critic")}), params)


def test_scores_are_those_of_whole_trajectories():
    learner, several = learners("independent")
    batch = trajectories(12)
    rows = [make_row(t, length=LENGTH, steps_per_segment=1, lambda_=0.7) for t in batch]
    whole = host(restart(learner, **NUMBERS).score([[row] for row in rows]))
    found = host(restart(several, **NUMBERS).score([rows_of(t, 0, 1) for t in batch]))
    for name in ("value_count", "returns", "returns_sq", "error", "error_sq"):
        assert found[name] == pytest.approx(whole[name], rel=1e-5), name


def test_an_arrival_trained_critic_steps_once_for_all_rows_of_a_trajectory():
    choices = Choices(kl="off", critic_update="arrival", critic_passes=1)
    options = dict(length=LENGTH, batch=5, micro_rows=1)
    batch = trajectories()
    whole = [[make_row(t, length=LENGTH, steps_per_segment=1, lambda_=0.7)] for t in batch]
    found = []
    for learner, rows in ((make_learner(choices, **options), whole), (make_learner(choices, most=5, **options), None)):
        restart(learner, **NUMBERS)
        for n, t in enumerate(batch):
            learner.put(*(rows[n] if rows else make_rows(t, length=LENGTH, steps_per_segment=1, lambda_=0.7)))
        assert int(learner.state["critic_opt"].count) == 5
        found.append(host(learner.state["critic"]))
    assert_close(found[1], found[0])


def test_nothing_is_compiled_after_the_warm_up():
    learner = make_learner(choices_of("corrected"), length=LENGTH, batch=5, most=5)
    assert "links" in learner.warm_up(blank_row(LENGTH), preheat=True)
    programs = learner.programs
    compiled = [programs.put, programs.links, programs.chain, programs.window("both"), programs.window("again")]
    before = [program._cache_size() for program in compiled]
    result(learner, [rows_of(t, n, 1) for n, t in enumerate(trajectories())])
    result(learner, [rows_of(t, n, 1)[:1] for n, t in enumerate(trajectories())])
    learner.critic_only = True
    learner.score([rows_of(t, n, 1) for n, t in enumerate(trajectories(7))])
    assert before == [program._cache_size() for program in compiled]


def test_a_trajectory_with_more_rows_than_planned_for_is_refused():
    learner = restart(learners("independent")[0], **NUMBERS)
    with pytest.raises(ValueError, match="2 rows; this learner takes 1 to 1"):
        learner.put(blank_row(LENGTH), blank_row(LENGTH))


def test_dropped_context_is_the_only_thing_that_changes_log_probs():
    t = trajectories()[0]
    whole = make_row(t, length=LENGTH, steps_per_segment=1, lambda_=0.7)
    policy = learners("given")[0].start["policy"]
    rows = rows_of(t, 0, 1)
    logp, cut_logp = policy_logp(policy, [whole])[0], policy_logp(policy, rows)
    seen = np.concatenate([cut_logp[i][row["action_mask"]] for i, row in enumerate(rows)])
    np.testing.assert_allclose(seen, logp[whole["action_mask"]], atol=1e-5)
    assert stack_rows(rows)["action_mask"].sum() == t.num_action_tokens
