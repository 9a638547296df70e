"""A trajectory cut into rows that hold its whole prefix is trained as the one row it would be."""

import dataclasses
import functools

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

from sao_jax.data.rows import blank_row, make_row, make_rows
from sao_jax.learner.objective import Choices
from sao_jax.runtime.devices import CompileCounter

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


BATCH = list(enumerate(trajectories()))


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


@functools.cache
def learner_of(name):
    return make_learner(choices_of(name), length=LENGTH, batch=5, micro_rows=2, most=5)


def whole_rows(batch, steps=1):
    return [[make_row(t, length=LENGTH, steps_per_segment=steps, lambda_=0.7, advantage=n - 2.5)] for n, t in batch]


def cut_rows(batch, steps=1):
    return [make_rows(t, length=LENGTH, steps_per_segment=steps, lambda_=0.7, advantage=n - 2.5) for n, t in batch]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


NAMES = [n if n in ("independent", "carried") else pytest.param(n, marks=pytest.mark.slow) for n in CHOICES]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_rows_with_the_whole_prefix_add_up_to_the_trajectory(name, steps):
    expected = result(learner_of(name), whole_rows(BATCH, steps))
    assert any(np.abs(g).max() > 1e-2 for g in jax.tree.leaves(expected[0]))
    assert_same(result(learner_of(name), cut_rows(BATCH, steps)), expected)


def test_room_for_several_rows_changes_nothing_for_one():
    one = make_learner(choices_of("carried"), length=LENGTH, batch=5, micro_rows=2)
    result(learner_of("carried"), cut_rows(BATCH))  # leaves nothing behind for the rows that take these places
    assert_same(result(learner_of("carried"), whole_rows(BATCH)), result(one, whole_rows(BATCH)))
    with pytest.raises(ValueError, match="2 rows; this learner takes 1 to 1"):
        one.put(blank_row(LENGTH), blank_row(LENGTH))


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "micro_rows", "shard"), [(2, 3, False), (8, 1, True)], ids=["2", "8-sharded"])
def test_rows_of_one_trajectory_are_trained_by_all_devices(devices, micro_rows, shard):
    options = dict(length=LENGTH, batch=5, most=5, shard_params=shard)
    learner = make_learner(choices_of("carried"), devices=devices, micro_rows=micro_rows, **options)
    assert_same(result(learner, cut_rows(BATCH)), result(learner_of("carried"), whole_rows(BATCH)))


def test_gradient_calls_in_between_change_nothing():
    learner = learner_of("independent")
    parts, _, params = result(learner, cut_rows(BATCH))
    restart(learner, **NUMBERS)
    for rows in cut_rows(BATCH):
        learner.put(*rows)
        learner.accumulate()
    assert_close([gradients(learner), gradients(learner, "critic")], parts)
    learner.update()
    assert_close(host({name: learner.state[name] for name in ("policy", "critic")}), params)


def test_scores_are_those_of_whole_trajectories():
    learner, batch = learner_of("independent"), list(enumerate(trajectories(12)))
    whole = host(restart(learner, **NUMBERS).score(whole_rows(batch)))
    found = host(learner.score(cut_rows(batch)))
    assert whole["value_count"] == sum(t.num_action_tokens for _, t in batch)
    for name in ("value_count", "returns", "returns_sq", "error", "error_sq"):
        assert found[name] == pytest.approx(whole[name], rel=1e-5), name


@pytest.mark.slow
def test_an_arrival_trained_critic_steps_once_for_all_rows_of_a_trajectory():
    choices = Choices(kl="off", critic_update="arrival", critic_passes=1)
    learner = make_learner(choices, length=LENGTH, batch=5, micro_rows=1, most=5)
    found = []
    for rows in (whole_rows(BATCH), cut_rows(BATCH)):
        restart(learner, **NUMBERS)
        for one in rows:
            learner.put(*one)
        assert int(learner.state["critic_opt"].count) == 5
        found.append(host(learner.state["critic"]))
    assert_close(found[1], found[0])


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up():
    learner = make_learner(choices_of("corrected"), length=LENGTH, batch=5, most=5)
    assert "links" in learner.warm_up(blank_row(LENGTH), preheat=True)
    counter = CompileCounter()
    batches = cut_rows(BATCH), whole_rows(BATCH)
    for rows in batches:
        for one in rows:
            learner.put(*one)
        learner.update()
    learner.critic_only = True
    learner.score(cut_rows(enumerate(trajectories(7))))
    assert counter.count == 0


def test_rows_with_the_whole_prefix_have_the_same_log_probs():
    _, t = BATCH[0]
    ((whole,), rows) = whole_rows(BATCH)[0], cut_rows(BATCH)[0]
    policy = learner_of("independent").start["policy"]
    logp, cut_logp = policy_logp(policy, [whole])[0], policy_logp(policy, rows)
    seen = np.concatenate([cut_logp[i][row["action_mask"]] for i, row in enumerate(rows)])
    np.testing.assert_allclose(seen, logp[whole["action_mask"]], atol=1e-5)
    assert len(seen) == t.num_action_tokens
