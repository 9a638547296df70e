"""What is read from the runs that are compared for idle devices, on a run made by hand."""

import json
import types

import pytest

from experiments import _claims_overlap as module
from sao_jax.runtime.ledger import Ledger


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function that writes a run: updates of four samples at given times, and readings."""
    now = [0.0]
    monkeypatch.setattr("sao_jax.runtime.ledger.time", types.SimpleNamespace(time=lambda: now[0]))

    def new(times, busy=(0.5, 0.7), latencies=None):
        with Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
            reading = lambda share: ledger.record(  # noqa: E731
                "concurrency", {"utilization": share, "utilization_slots": share / 2}
            )
            reading(0.01)  # before the first update
            for version, now[0] in enumerate(times, 1):
                ledger.record("update", {"version": version, "rollouts": 4})
                if version == 1:
                    for share in busy:
                        reading(share)
            ledger.admit(0, "t", 0, 0)
            now[0] = 1000.0
            ledger.record("update", {"version": len(times) + 1, "rollouts": 4})  # the last stragglers'
            reading(0.02)
        lines = [{"stage": "rl", "version": v, "async/publish_latency_s": x} for v, x in (latencies or {}).items()]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path

    return new


def test_figures_leave_out_the_beginning_and_the_stragglers(make):
    latencies = {1: 50.0, 2: 0.25, 3: 0.5, 4: 0.75, 5: 1.0, 6: 1.25, 7: 99.0}
    found = module.read_overlap(make([10.0, 11.0, 13.0, 16.0, 20.0, 25.0], latencies=latencies))
    assert found.figures == pytest.approx({"utilization": 60.0, "by slots": 30.0, "samples/s": 20 / 15})
    busy, rates, published = found.parts.values()
    assert busy == pytest.approx([50.0, 70.0])
    assert rates == pytest.approx([16 / 10, 16 / 14])  # four updates after the first one of each window
    assert published == [0.25, 0.5, 0.75, 1.0, 1.25]


def test_a_short_run_is_one_window(make):
    assert module.read_overlap(make([10.0, 12.0])).parts["samples/s over 4 updates"] == [2.0]


def test_a_run_that_cannot_tell_is_named(make):
    with pytest.raises(ValueError, match="has 1 updates before its last task was handed out; 2 are needed"):
        module.read_overlap(make([10.0]))


def test_a_run_without_readings_is_named(make):
    with pytest.raises(ValueError, match="no reading of how busy devices were"):
        module.read_overlap(make([10.0, 11.0], busy=()))


def test_quantiles_are_taken_over_all_moments_of_all_repetitions(monkeypatch):
    runs = [module.Overlap({"samples/s": 1.0}, {"busy": [float(x) for x in part], "late": []}) for part in
            (range(51), range(51, 101))]  # fmt: skip
    assert module.quantiles(runs) == {"busy: p1 / p50 / p99": [1.0, 50.0, 99.0]}
    monkeypatch.setattr(module, "overlap", lambda asked: ({(side, 1.29): runs for side in module.SIDES}, [0, 1], {}))
    measured = module.throughput(None)
    assert measured.notes["groups, sigma 1.29"] == {"samples/s": 1.0, "busy: p1 / p50 / p99": [1.0, 50.0, 99.0]}
    assert (measured.value, measured.effect[0]) == (1.0, 1.0)
