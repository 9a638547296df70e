import dataclasses

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from helpers import random_trajectory

import sao_jax as sao
from sao_jax.objectives import beta_tracker
from sao_jax.runtime.collector import Collector, DeadGroupsError, Dropped, Ready
from sao_jax.runtime.config import RunConfig


def collector(baseline="dr_grpo", n=2, **flags):
    return Collector(
        RunConfig(baseline=baseline, kl="off", n_samples_per_prompt=n, batch_size=4 * n, **flags).resolved()
    )


def finished(rewards, groups=None, **labels):
    """One trajectory per reward; rollout ids are positions."""
    rng = np.random.default_rng(0)
    groups = [0] * len(rewards) if groups is None else groups
    return [
        random_trajectory(rng, rollout=i, group=g, reward=r, **labels)
        for i, (r, g) in enumerate(zip(rewards, groups, strict=True))
    ]


def add_all(collector, trajectories):
    return [decided for t in trajectories for decided in collector.add(t)]


def advantages(decided):
    assert all(isinstance(d, Ready) for d in decided)
    return {d.trajectory.rollout: d.advantage for d in decided}


def test_with_a_critic_everything_is_ready_at_once():
    c = Collector(RunConfig().resolved())
    (ready,) = c.add(finished([0.5])[0])
    assert (ready.advantage, c.held) == (0.0, 0)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@hypothesis.given(data=st.data())
@hypothesis.settings(deadline=None, max_examples=15)
def test_groups_are_those_of_the_objective_in_any_order_of_arrival(kind, data):
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.1, 1.0]), min_size=6, max_size=6))
    groups = [0, 0, 0, 1, 1, 1]
    order = data.draw(st.permutations(range(6)))
    c = collector(kind, n=3, drop_dead_groups=False)
    trajectories = finished(rewards, groups)
    got = advantages(add_all(c, [trajectories[i] for i in order]))
    expected = np.asarray(sao.group_advantages(np.float32(rewards), np.array(groups), kind=kind))
    np.testing.assert_allclose([got[i] for i in range(6)], expected, atol=1e-5)
    assert c.held == 0


def test_members_of_groups_may_be_interleaved():
    got = advantages(add_all(collector(), finished([1.0, 10.0, 3.0, 14.0], groups=[5, 6, 5, 6])))
    assert got == {0: -1.0, 1: -2.0, 2: 1.0, 3: 2.0}


def test_a_group_is_what_the_sampler_says_and_not_equal_text():
    c = collector(drop_dead_groups=False)
    trajectories = finished([0.0, 0.0, 1.0, 1.0], groups=[0, 0, 1, 1], task="p")
    assert set(advantages(add_all(c, trajectories)).values()) == {0.0}


def test_attempts_of_one_group_may_differ_in_everything_else():
    one, other = finished([1.0, 0.0])
    rng = np.random.default_rng(1)
    other = random_trajectory(rng, rollout=1, group=0, reward=0.0, task="other name", seed=9, attempt=2, sample=1)
    assert advantages(add_all(collector(), [one, other])) == {0: 0.5, 1: -0.5}


def test_one_success_keeps_the_whole_group():
    got = advantages(add_all(collector("rloo", n=5), finished([0.0, 0.0, 1.0, 0.0, 0.0])))
    assert got == pytest.approx({0: -0.25, 1: -0.25, 2: 1.0, 3: -0.25, 4: -0.25})


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1.0])
def test_a_group_of_equal_rewards_is_dropped_whole(reward):
    decided = add_all(collector("grpo", n=7), finished([reward] * 7))
    assert [(d.trajectory.rollout, d.reason) for d in decided] == [(i, "dead group") for i in range(7)]
    assert all(isinstance(d, Dropped) for d in decided)


def test_equal_rewards_that_are_kept_have_advantage_zero():
    decided = add_all(collector("grpo", n=7, drop_dead_groups=False), finished([0.1] * 7))
    assert set(advantages(decided).values()) == {0.0}


def test_dead_groups_in_a_row_end_the_run_with_a_message():
    c = collector(max_dead_groups=2)
    dead = lambda g: finished([0.0, 0.0], groups=[g, g])  # noqa: E731
    add_all(c, dead(0))
    add_all(c, dead(1))
    add_all(c, finished([0.0, 1.0], groups=[2, 2]))  # a live one between: counted anew
    add_all(c, dead(3))
    add_all(c, dead(4))
    with pytest.raises(DeadGroupsError, match=r"3 groups in a row had equal rewards \(last: 0\).*--max-dead-groups"):
        add_all(c, dead(5))


def test_a_lost_member_is_not_waited_for():
    c = collector("dr_grpo", n=3)
    first, second, _ = finished([0.0, 1.0, 0.0])
    assert c.add(first) == []
    assert c.lose(0) == []
    assert c.held == 1
    assert advantages(c.add(second)) == {0: -0.5, 1: 0.5}
    assert c.held == 0


def test_a_group_whose_last_member_is_lost_is_decided_by_the_loss():
    c = collector("dr_grpo", n=3)
    assert add_all(c, finished([0.0, 1.0])) == []
    assert advantages(c.lose(0)) == {0: -0.5, 1: 0.5}


def test_what_is_left_of_a_group_of_two_has_no_baseline_and_is_dropped():
    c = collector()
    assert c.lose(0) == []
    (dropped,) = c.add(finished([1.0])[0])
    assert (dropped.reason, c.held) == ("group of one", 0)


def test_a_group_of_which_all_are_lost_leaves_nothing():
    c = collector()
    assert c.lose(0) == []
    assert c.lose(0) == []
    assert c.flush() == []
    # and its id may come again
    assert len(add_all(c, finished([0.0, 1.0]))) == 2


def test_flush_decides_what_is_held():
    c = collector("dr_grpo", n=3)
    add_all(c, finished([0.0, 1.0, 0.5], groups=[0, 0, 1]))
    decided = c.flush()
    assert advantages(decided[:2]) == {0: -0.5, 1: 0.5}
    assert decided[2].reason == "group of one"
    assert c.held == 0
    assert c.flush() == []


def test_batch_mean_is_over_a_batch_in_order_of_arrival():
    c = Collector(RunConfig(baseline="batch_mean", kl="off", batch_size=3).resolved())
    got = advantages(add_all(c, finished([0.0, 3.0, 0.0, 5.0])))
    assert got == {0: -1.0, 1: 2.0, 2: -1.0}
    assert c.held == 1
    assert [d.reason for d in c.flush()] == ["group of one"]


def test_running_mean_is_of_the_rewards_before():
    def fresh():
        return Collector(RunConfig(baseline="running_mean", kl="off").resolved())

    rewards = [1.0, 0.0, 2.0, 1.0]
    c = fresh()
    got = advantages(add_all(c, finished(rewards)))
    assert got == pytest.approx({0: 0.0, 1: -1.0, 2: 1.5, 3: 0.0})
    resumed = fresh()
    for r in rewards[:2]:
        resumed.prime("", r)
    assert advantages(add_all(resumed, finished(rewards)[2:])) == pytest.approx({2: 1.5, 3: 0.0})


def test_spo_is_the_tracker_standardised_over_the_batch():
    config = RunConfig(baseline="spo", kl="off", train_tasks=2, batch_size=4).resolved()
    rewards, tasks = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0], ["x", "y"] * 4
    trajectories = [t for r, task in zip(rewards, tasks, strict=True) for t in finished([r], task=task)]
    trajectories = [dataclasses.replace(t, rollout=i) for i, t in enumerate(trajectories)]
    c, expected, kl = Collector(config), {}, {"x": 0.0, "y": 0.0}
    counts = {"x": (1.0, 1.0), "y": (1.0, 1.0)}
    got = {}
    for batch in (range(4), range(4, 8)):
        c.drift = 0.03 * (batch.start > 0)
        got |= advantages(add_all(c, [trajectories[i] for i in batch]))
        raw = []
        for i in batch:
            advantage, *counts[tasks[i]] = beta_tracker(*counts[tasks[i]], rewards[i], kl=c.drift - kl[tasks[i]])
            kl[tasks[i]] = c.drift
            raw.append(float(advantage))
        expected |= dict(zip(batch, (np.array(raw) - np.mean(raw)) / np.std(raw), strict=True))
    assert got == pytest.approx(expected, abs=1e-5)
    resumed = Collector(config)
    for task, reward in zip(tasks[:4], rewards[:4], strict=True):
        resumed.prime(task, reward)
    resumed.drift = c.drift
    again = advantages(add_all(resumed, trajectories[4:]))
    assert again == pytest.approx({i: got[i] for i in range(4, 8)})
