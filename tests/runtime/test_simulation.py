"""The simulated cluster: it drives the real router."""

import numpy as np
import pytest

from sao_jax.runtime.concurrency import Control
from sao_jax.runtime.router import Limits
from sao_jax.runtime.simulation import Cluster, simulate, simulate_concurrency

pytest.importorskip("simpy", reason="needs pip install -e '.[simulation]'")


def test_adaptive_routing_starts_tasks_sooner_than_turns():
    cluster = Cluster(load=0.7)
    adaptive, turns = (simulate(cluster, 3000, policy=p) for p in ("adaptive", "round_robin"))
    assert adaptive.percentile(99) < 0.1 * turns.percentile(99)
    assert adaptive.percentile(50) == 0.0
    assert turns.percentile(99) > 1.0
    assert len(adaptive.latency_s) == len(adaptive.decision_s) == 3000
    assert np.all(adaptive.latency_s >= 0)


def test_one_worker_is_a_queue_and_ends():
    figures = simulate(Cluster(workers=1, load=0.5), 200)
    assert figures.seconds > 0
    assert figures.percentile(99) > 0


def test_balance_keeps_devices_below_their_limit():
    cluster = Cluster(load=0.7, warmest_c=50.0)
    with_it, without = (simulate(cluster, 4000, balance=b) for b in (True, False))
    assert without.hot > 0.01
    assert with_it.hot < 0.5 * without.hot
    assert simulate(cluster, 500, limits=Limits(hot_c=200.0)).hot == 0.0


def test_balance_leaves_memory_where_there_is_little():
    cluster = Cluster(slots=4, load=0.5, least_room=0.3, task_memory=0.15)
    with_it, without = (simulate(cluster, 6000, balance=b) for b in (True, False))
    assert without.full > 0.03
    assert with_it.full < 0.7 * without.full
    assert max(with_it.hot, with_it.full) <= with_it.spots <= with_it.hot + with_it.full
    assert simulate(Cluster(), 500).full == 0.0


def test_a_simulation_is_a_function_of_its_seed():
    first, again, other = (simulate(Cluster(workers=8), 300, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.latency_s, again.latency_s)
    assert first.seconds == again.seconds != other.seconds


@pytest.mark.slow
def test_ten_thousand_workers_on_one_core():
    figures = simulate(Cluster(workers=10_000, reading_s=5.0), 30_000)
    assert figures.percentile(99) == 0.0
    assert figures.hot < 0.01


def within(decisions, begin, end):
    chosen = [d for d in decisions if begin <= d.time_s < end]
    return np.array([d.utilization for d in chosen]), np.array([int(d.level) for d in chosen])


def test_the_controller_finds_its_target_holds_it_and_recovers_from_slower_environments():
    cluster, control = Cluster(workers=16, slots=512), Control(highest=8192, target=0.85)
    decisions = simulate_concurrency(cluster, control, seconds=300.0, slower_at=150.0, slower_by=2.0)
    utilization, levels = within(decisions, 80.0, 150.0)
    assert abs(utilization.mean() - 0.85) < 0.05
    assert levels.std() < 0.1 * levels.mean(), "it oscillates"
    dip, _ = within(decisions, 152.0, 160.0)
    assert dip.min() < 0.82, "the environments did not become slower"
    utilization, slower = within(decisions, 240.0, 300.0)
    assert abs(utilization.mean() - 0.85) < 0.05
    assert slower.std() < 0.1 * slower.mean()
    assert slower.mean() > 1.4 * levels.mean()


def test_the_controller_stays_within_its_ends():
    control = Control(lowest=2, highest=24, target=0.9)
    _, levels = within(simulate_concurrency(Cluster(workers=4, slots=8), control, seconds=60.0), 0.0, 60.0)
    assert levels.min() >= 2
    assert levels[-1] == levels.max() == 24, "so few cannot keep the devices busy"


@pytest.mark.slow
def test_the_controller_fills_five_hundred_workers():
    cluster, control = Cluster(workers=500, slots=64), Control(lowest=1000, highest=32_000, target=0.5)
    utilization, levels = within(simulate_concurrency(cluster, control, seconds=50.0, turns=2), 34.0, 50.0)
    assert abs(utilization.mean() - 0.5) < 0.06
    assert levels.std() < 0.1 * levels.mean()
