"""Evaluations led by values: what is counted, and that slow environments and failures change nothing."""

import dataclasses
import threading

import jax
import numpy as np
import pytest
from helpers import MODEL_FLAGS, Tiny, quick_compile  # noqa: F401

from sao_jax.models.decoder import init_params
from sao_jax.rollout.agents import Failure
from sao_jax.rollout.budget import DynamicBudget, FixedBudget
from sao_jax.rollout.engine import Engine
from sao_jax.rollout.guided import Search
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.devices import data_mesh
from sao_jax.runtime.guidance import Guide, budget_evaluation, ending, guided_evaluation, plain_attempt, restored_guide

CONFIG = RunConfig(task="tiny", slots=8, env_workers=4, max_attempts=2, **MODEL_FLAGS).resolved()


class Long(Tiny):
    """Room for three actions of a policy that seldom ends one."""

    max_tokens = 96


class Fickle(Long):
    """Fails on the first attempts at an instance, `times` of them."""

    def __init__(self, times):
        super().__init__(turns=2)
        self.times, self.asked = times, {}

    def respond(self, problem, actions):
        if len(actions) == 1:
            self.asked[problem] = self.asked.get(problem, 0) + 1
            if self.asked[problem] <= self.times:
                raise RuntimeError("not yet")
        return super().respond(problem, actions)


def a_in_the_first_action(family):
    """Values that know what `Tiny` pays for."""

    def values(prefixes):
        texts = [family.tokenizer.decode(p)[3:] for p in prefixes]
        return np.array([float("a" in text.split(";")[0]) if text else 0.5 for text in texts], np.float32)

    return values


@pytest.fixture(scope="module")
def engine():
    model = CONFIG.model(Tiny.tokenizer.vocab_size)
    params = init_params(model, jax.random.key(0))
    stop = Tiny.tokenizer.encode(";")
    return Engine(model, params, mesh=data_mesh(1), slots=8, context=96, stop_ids=stop, seed=0, burst=16)


def guide(engine, family, values=None):
    return Guide(engine, family, values or a_in_the_first_action(family), CONFIG, context=96)


def test_values_that_know_the_task_lift_success_at_equal_tokens(engine):
    result = guided_evaluation(guide(engine, Long(turns=2)), 24, Search(4))
    figures = result.figures
    assert figures["success"] > figures["plain"]["success"]
    assert figures["plain_ranked"] == figures["plain_any"] > figures["plain"]["success"]
    # The last attempt of the plain ones may go over what guided sampling took, by no more than itself and its round.
    assert figures["sampled_tokens"] <= figures["plain"]["sampled_tokens"] <= 1.2 * figures["sampled_tokens"]
    assert len(result.trajectories) == 24
    assert not any(t.trainable for t in result.trajectories)
    kept = sum(t.num_action_tokens for t in result.trajectories)
    assert kept < figures["sampled_tokens"]  # candidates that were not kept count
    again = guided_evaluation(guide(engine, Long(turns=2)), 24, Search(4))
    assert again.figures == figures


def test_slow_environments_are_waited_for_and_change_nothing(engine):
    fast = guided_evaluation(guide(engine, Long(turns=2)), 6, Search(2, beam=2, after="observation"))
    slow = guided_evaluation(guide(engine, Long(turns=2, wait=0.002)), 6, Search(2, beam=2, after="observation"))
    assert slow.figures == fast.figures


def test_an_environment_that_hangs_costs_its_attempt_and_no_more(engine):
    class Hangs(Long):
        def respond(self, problem, actions):
            if problem == stuck:
                threading.Event().wait(30)
            return super().respond(problem, actions)

    family = Hangs(turns=2, wait=0.001)
    stuck = family.instance("test", 1).problem
    config = dataclasses.replace(CONFIG, env_timeout=0.3)
    led = Guide(engine, family, a_in_the_first_action(family), config, context=96)
    figures = guided_evaluation(led, 3, Search(2, after="observation")).figures
    assert figures["failed"] == 1


def test_a_dynamic_budget_spends_about_what_the_fixed_one_does_on_more_attempts(engine):
    result = budget_evaluation(guide(engine, Long(turns=3)), 24, DynamicBudget(max_restarts=20), FixedBudget())
    figures, fixed = result.figures, result.figures["fixed"]
    assert figures["restarts"] > 0
    assert figures["success"] > fixed["success"]
    assert figures["cut"] >= figures["restarts"]
    assert figures["sampled_tokens"] <= 1.2 * fixed["sampled_tokens"]
    assert fixed["cut"] == 0


def test_a_fixed_budget_has_nothing_to_be_compared_with(engine):
    result = budget_evaluation(guide(engine, Long(turns=3)), 8, FixedBudget(steps=1), FixedBudget(steps=1))
    assert "fixed" not in result.figures
    assert result.figures["cut"] == 8
    assert {(t.end, t.num_steps) for t in result.trajectories} == {("truncated", 1)}


def test_failed_attempts_are_made_again_and_their_tokens_count(engine):
    played = guide(engine, Fickle(1)).run(range(4), plain_attempt)
    assert not any(isinstance(p.result.outcome, Failure) for p in played)
    assert all(p.result.outcome.attempt == 1 for p in played)
    assert all(p.sampled > p.result.outcome.num_action_tokens for p in played)
    played = guide(engine, Fickle(2)).run(range(1), plain_attempt)  # one of many restarts may fail
    assert isinstance(played[0].result.outcome, Failure)
    with pytest.raises(ValueError, match="all 4 attempts failed; the last: environment: RuntimeError: not yet"):
        guided_evaluation(guide(engine, Fickle(2)), 4, Search(2))


def test_a_whole_attempt_is_valued_where_its_last_stop_token_was_chosen(engine):
    (played,) = guide(engine, Long(turns=2)).run([0], plain_attempt)
    t = played.result.outcome
    last = int(np.flatnonzero(t.action_mask)[-1])
    alone = not t.action_mask[last - 1]
    assert len(ending(t, set(Tiny.tokenizer.encode(";")))) == last + alone
    assert len(ending(t, set())) == last + 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"preset": "grpo"}, r"has no critic \(--baseline grpo\)"),
        ({"temperature": 0.0}, "nothing to choose from"),
        ({"context_window": 64}, r"samples in windows \(--context-window 64\)"),
    ],
)
def test_a_run_without_a_choice_a_critic_or_whole_contexts_is_refused(flags, says, tmp_path):
    config = RunConfig(task="tiny", preset=flags.get("preset", "seed"), **MODEL_FLAGS).resolved()
    config = dataclasses.replace(config, **{k: v for k, v in flags.items() if k != "preset"})
    with pytest.raises(ValueError, match=says):
        restored_guide(config, tmp_path)
