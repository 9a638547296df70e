"""The simulated cluster: it drives the real router."""

import numpy as np
import pytest

from sao_jax.runtime.router import Limits
from sao_jax.runtime.simulation import Cluster, simulate

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


def test_a_simulation_is_a_function_of_its_seed():
    first, again, other = (simulate(Cluster(workers=8), 300, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.latency_s, again.latency_s)
    assert first.seconds == again.seconds != other.seconds


@pytest.mark.slow
def test_ten_thousand_workers_on_one_core():
    figures = simulate(Cluster(workers=10_000, reading_s=5.0), 30_000)
    assert figures.percentile(99) == 0.0
    assert figures.hot < 0.01
