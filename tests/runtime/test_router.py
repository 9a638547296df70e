"""The router: who gets a task, who does not, and what a change of the set of workers moves."""

import collections
import math

import numpy as np
import pytest

from sao_jax.runtime import router as module
from sao_jax.runtime.router import Limits, NoWorkerError, Reading, Router, owner


@pytest.fixture
def no_exploration(monkeypatch):
    monkeypatch.setattr(module, "EXPLORATION", 0.0)


def make(slots, **options):
    router = Router(**options)
    for name, n in slots.items():
        router.join(name, slots=n)
    return router


def test_a_task_goes_where_it_will_be_done_soonest(no_exploration):
    router = make({"a": 4, "b": 4})
    for name, seconds in (("a", 1.0), ("b", 3.0)):
        router.workers[name].latency_s = seconds
    # (running + 1) / slots * latency: a at 1, 2, 3, 4 quarters, b at 3 for its first
    assert [router.route(i, 0.0) for i in range(3)] == ["a"] * 3 or router.workers["b"].running == 1
    assert router.workers["a"].running >= 2
    counts = collections.Counter(router.route(i, 0.0) for i in range(5))
    assert router.workers["a"].running == router.workers["b"].running == 4
    with pytest.raises(NoWorkerError, match="none of 2 workers"):
        router.route("more", 0.0)
    assert sum(counts.values()) == 5


def test_latencies_are_smoothed_and_unknown_workers_are_tried_first(no_exploration):
    router = make({"a": 1, "b": 1})
    router.ended(router.route(0, 0.0), 2.0, 2.0)
    first = next(n for n, w in router.workers.items() if w.latency_s)
    assert router.workers[first].latency_s == 2.0
    assert router.route(1, 2.0) != first
    router.ended(router.route(2, 2.0), 7.0, 9.0)
    assert router.workers[first].latency_s == pytest.approx(2.0 + module.SMOOTHING * 5.0)


def test_a_share_of_tasks_explores():
    router = make({"quick": 10**6, "slow": 10**6}, seed=1)
    router.workers["quick"].latency_s, router.workers["slow"].latency_s = 1e-9, 10.0
    for i in range(2000):
        router.route(i, float(i))
    assert 10 <= router.workers["slow"].running <= 80  # half of 2 %: the one that waited longest, in turn


def test_a_worker_that_fails_is_left_alone_for_longer_each_time(no_exploration):
    router = make({"a": 1})
    now = 0.0
    for pause in (1.0, 2.0, 4.0):
        assert router.route("t", now) == "a"
        router.failed("a", now)
        with pytest.raises(NoWorkerError):
            router.route("t", now + pause - 0.01)
        now += pause
    assert router.route("t", now) == "a"
    router.ended("a", 0.1, now)
    router.route("t", now)
    router.failed("a", now)
    assert router.workers["a"].barred_until == now + module.BAR_S, "one success and the count starts anew"


def test_two_failures_at_once_bar_until_the_later_end(no_exploration):
    router = make({"a": 2})
    router.route(0, 0.0)
    router.route(1, 0.0)
    router.failed("a", 0.0)
    router.failed("a", 0.5)
    with pytest.raises(NoWorkerError):
        router.route(2, 2.4)
    assert router.route(2, 2.5) == "a"


def test_heat_and_scarce_memory_lower_weights_before_a_limit_is_reached(no_exploration):
    limits = Limits(warm_c=70, hot_c=80, scarce=0.2, full=0.1)
    assert limits.factor(Reading()) == limits.factor(Reading(70.0, 0.2)) == 1.0
    assert limits.factor(Reading(75.0, 0.5)) == pytest.approx(0.5)
    assert limits.factor(Reading(75.0, 0.15)) == pytest.approx(0.25)
    assert limits.factor(Reading(temperature_c=99.0)) == 0.0
    assert limits.factor(Reading(free_memory=0.0)) == 0.05
    router = make({"cool": 1000, "warm": 1000}, limits=limits)
    for worker in router.workers.values():
        worker.latency_s = 1.0
    router.observe("warm", Reading(temperature_c=77.5))  # a quarter of its weight is left
    counts = collections.Counter(router.route(i, 0.0) for i in range(500))
    assert counts["cool"] == pytest.approx(4 * counts["warm"], rel=0.05)
    router.observe("warm", Reading(temperature_c=81.0))
    assert {router.route(i, 0.0) for i in range(100)} == {"cool"}
    router.observe("cool", Reading(free_memory=0.05))
    assert router.route("t", 0.0) == "cool", "an engine has its memory: little is left elsewhere, and it can go on"
    router.observe("warm", Reading(temperature_c=60.0))
    counts = collections.Counter(router.route(i, 0.0) for i in range(100))
    assert counts["warm"] > 80
    router.observe("warm", Reading(temperature_c=81.0))
    router.observe("cool", Reading(temperature_c=81.0))
    with pytest.raises(NoWorkerError):
        router.route("t", 0.0)


def test_keys_of_a_worker_that_leaves_move_and_no_others():
    names, keys = [f"w{i}" for i in range(20)], range(4000)
    before = {k: owner(k, names) for k in keys}
    after = {k: owner(k, names[1:]) for k in keys}
    assert all(before[k] == after[k] for k in keys if before[k] != "w0")
    shares = np.array(list(collections.Counter(before.values()).values()))
    assert len(shares) == 20
    assert shares.min() > 140
    assert shares.max() < 260
    joined = {k: owner(k, [*names, "new"]) for k in keys}
    assert {joined[k] for k in keys if joined[k] != before[k]} == {"new"}


def test_trajectories_that_lost_their_worker_spread_over_the_others_whatever_is_known_of_them():
    names = [f"w{i}" for i in range(4)]
    routers = [make(dict.fromkeys(names, 100), seed=seed) for seed in (0, 1)]
    for router, quick in zip(routers, ("w1", "w2"), strict=True):
        for name in names:
            router.workers[name].latency_s = 0.001 if name == quick else 10.0
        router.leave("w0")
    places = [[router.route(k, 0.0, moved=True) for k in range(90)] for router in routers]
    assert places[0] == places[1] == [owner(k, names[1:]) for k in range(90)]
    assert min(collections.Counter(places[0]).values()) > 15
    assert routers[0].workers["w1"].running == places[0].count("w1")


def test_a_moved_trajectory_goes_to_none_that_is_full_barred_or_hot():
    router = make(dict.fromkeys("abcd", 1))
    key = next(k for k in range(1000) if owner(k, "abcd") == "a" and owner(k, "bcd") == "b" and owner(k, "cd") == "c")
    assert router.route(key, 0.0, moved=True) == "a"
    router.failed("a", 0.0)
    assert router.route(key, 0.0, moved=True) == "b"
    router.observe("c", Reading(temperature_c=99.0))
    assert router.route(key, 0.0, moved=True) == "d"
    with pytest.raises(NoWorkerError):
        router.route(key, 0.5, moved=True)
    assert router.route(key, 1.0, moved=True) == "a", "it may be tried again"


def test_tasks_of_workers_that_left_are_forgotten_and_places_stay_right():
    rng = np.random.default_rng(0)
    router, running = Router(seed=3), collections.Counter()
    for step in range(3000):
        action, name = rng.integers(6), f"w{rng.integers(12)}"
        if action == 0 and name not in router.workers:
            router.join(name, slots=int(rng.integers(1, 4)))
        elif action == 1 and name in router.workers:
            router.leave(name)
            running[name] = 0
        elif action == 2:
            router.observe(name, Reading(float(rng.uniform(60, 90)))) if name in router.workers else None
        elif action == 3 and running[name]:
            router.failed(name, float(step))
            running[name] -= 1
        elif action == 4 and running[name]:
            router.ended(name, float(rng.uniform(0, 2)), float(step))
            running[name] -= 1
        elif action == 5:
            try:
                running[router.route(step, float(step))] += 1
            except NoWorkerError:
                assert not any(
                    w.running < w.slots and w.factor > 0 and w.barred_until <= step for w in router.workers.values()
                )
        assert [w.place for w in router._open] == list(range(len(router._open)))
        for n, w in router.workers.items():
            assert w.running == running[n] <= w.slots
            assert w.place is None or (w.factor > 0 and w.running < w.slots)
    router.ended("nobody", 1.0, 0.0)
    router.failed("nobody", 0.0)


@pytest.mark.parametrize("bad", [dict(warm_c=90), dict(scarce=0.01), dict(full=-0.1), dict(scarce=1.5)])
def test_limits_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match=r"must be|needed"):
        Limits(**bad)


def test_workers_that_make_no_sense_are_refused():
    router = make({"a": 1})
    with pytest.raises(ValueError, match="'a' has joined already"):
        router.join("a", slots=1)
    with pytest.raises(ValueError, match="has 0 slots"):
        router.join("b", slots=0)
    router.leave("a")
    for moved in (False, True):
        with pytest.raises(NoWorkerError):
            router.route("t", 0.0, moved=moved)
    assert math.isnan(Reading().temperature_c)
