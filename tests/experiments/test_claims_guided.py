"""The claims about a critic that leads attempts, without its runs."""

import pathlib

import pytest

from experiments import _claims, _claims_guided
from experiments._claim import Request
from sao_jax.runtime import guidance
from sao_jax.runtime.config import RunConfig

ASKED = Request(True, pathlib.Path("nowhere"), lambda: None)


@pytest.mark.parametrize("quick", [True, False])
def test_the_runs_flags_are_those_of_a_run_with_a_critic(quick):
    config = RunConfig(**_claims_guided.run_flags(1, quick)).resolved()
    assert config.has_critic
    assert (config.task, config.seed, config.temperature) == (_claims_guided.TASK, 1, 1.0)


@pytest.fixture
def two_seeds(monkeypatch):
    monkeypatch.setattr(_claims_guided, "_guides", lambda asked: iter([(0, 0.50), (1, 0.60)]))


def test_guided_success_is_compared_with_plain_attempts_that_the_critic_picks(two_seeds, monkeypatch):
    def evaluated(base, count, search):
        figures = dict(success=base + 0.01 * search.width, sampled_tokens=200, solved_per_1k_tokens=3.0)
        figures |= dict(plain=dict(success=base, sampled_tokens=100, solved_per_1k_tokens=9.0))
        return guidance.Comparison(figures | dict(plain_ranked=base + 0.02, plain_any=0.9), [])

    monkeypatch.setattr(guidance, "guided_evaluation", evaluated)
    m = _claims.CLAIMS["value-guided"].measure(ASKED)
    assert m.effect[0] == pytest.approx(2.0)
    assert (m.value, m.baseline, m.seeds) == (pytest.approx(59.0), pytest.approx(57.0), [0, 1])
    assert m.notes["beam 2 of 8: success, %"] == 63.0
    assert m.notes["best of 4: tokens over plain tokens"] == 2.0


def test_dynamic_length_is_compared_with_its_fixed_twin(two_seeds, monkeypatch):
    def evaluated(base, count, budget, fixed):
        assert (budget.judges, fixed.judges) == (True, False)
        assert budget.steps == fixed.steps
        own = dict(success=base + 0.03 * budget.patience, sampled_tokens=99, cut=32, restarts=64, unanswered=16)
        return guidance.Comparison(own | dict(fixed=dict(success=base, sampled_tokens=100)), [])

    monkeypatch.setattr(guidance, "budget_evaluation", evaluated)
    m = _claims.CLAIMS["dynamic-length"].measure(ASKED)
    assert m.effect[0] == pytest.approx(3.0)
    assert m.notes["patience 2: success, %"] == 61.0
    assert m.notes["cut, % of attempts"] == 25.0
    assert m.notes["without an answer, %"] == 25.0
