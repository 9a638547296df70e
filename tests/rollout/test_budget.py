"""Budgets: decisions on recorded traces, and attempts that follow them."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from scripted_attempts import Letters, Writer

from sao_jax.rollout.budget import Allowance, Cut, DynamicBudget, FixedBudget, Progress
from sao_jax.rollout.budgeted import budgeted_attempt
from sao_jax.rollout.lanes import play


def cut_after(budget, values, tokens_per_action=5):
    """Actions until a budget ends a recorded attempt, and why; None if it never does."""
    allowance = budget.allowance(values[0])
    for n in range(1, len(values)):
        if why := budget.verdict(Progress(tuple(values[: n + 1]), n * tokens_per_action), allowance):
            return n, why
    return None


FELL = (0.6, 0.55, 0.2, 0.5, 0.1, 0.05, 0.02)  # prompt, then after each action; half of the prompt's value is 0.3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2, "value under 0.3 after 1 actions")),
        ({"patience": 2}, (5, "value under 0.3 after 2 actions")),
        ({"patience": 3}, (6, "value under 0.3 after 3 actions")),
        ({"patience": 4}, None),
        ({"drop": 0.0, "floor": 0.15}, (4, "value under 0.15 after 1 actions")),
        ({"drop": 0.0, "floor": 0.01}, None),
        ({"drop": 0.0, "floor": 0.0, "steps": 4, "ease": 0.0}, (4, "allowance of 4 actions")),
        ({"drop": 0.0, "floor": 0.0, "tokens": 12, "ease": 0.0}, (3, "allowance of 12 tokens")),
    ],
)
def test_a_recorded_attempt_is_cut_where_its_value_stays_low(options, expected):
    assert cut_after(DynamicBudget(**options), FELL) == expected


def test_a_hard_task_whose_value_does_not_fall_is_not_cut():
    assert cut_after(DynamicBudget(floor=0.05), (0.1, 0.09, 0.08, 0.07)) is None
    assert cut_after(DynamicBudget(floor=0.05), (0.7, 0.09, 0.08, 0.07)) == (1, "value under 0.35 after 1 actions")


def test_easy_tasks_are_allowed_less():
    budget = DynamicBudget(steps=10, tokens=200, ease=0.5)
    assert budget.allowance(0.0) == Allowance(10, 200)
    assert budget.allowance(0.5) == Allowance(8, 150)  # 7.5 to even
    assert budget.allowance(1.0) == Allowance(5, 100)
    assert budget.allowance(-3.0) == budget.allowance(0.0)
    assert budget.allowance(7.0) == budget.allowance(1.0)
    assert DynamicBudget().allowance(0.3) == Allowance(math.inf, math.inf)


def test_the_fixed_twin_allows_all_tasks_the_same_and_never_looks_at_values():
    budget = FixedBudget(steps=4)
    assert not budget.judges
    assert budget.allowance(0.0) == budget.allowance(1.0) == Allowance(4, math.inf)
    assert cut_after(budget, [math.nan] * 7) == (4, "allowance of 4 actions")
    assert budget.spend([Cut(0, 0.9, 0.1, 2, 0)], pool=1e9, cost=1.0) == {}


def test_tokens_go_where_they_are_worth_most():
    """Worth per token, whole attempts taking 40: task 1 begins anew for .8/40 = .02 (to go on would be .1/30). Task 2
    goes on for .3/10 = .03; a restart in its place would be worth (.6 - .3)/30 = .01 more. Task 3 goes on for .01/20.
    """
    budget = DynamicBudget(max_restarts=1)
    cut = [Cut(1, 0.8, 0.1, 10, 0), Cut(2, 0.6, 0.3, 30, 0), Cut(3, 0.01, 0.01, 20, 0)]
    assert budget.spend(cut, pool=9, cost=40) == {}
    assert budget.spend(cut, pool=10, cost=40) == {2: "resume"}
    assert budget.spend(cut, pool=50, cost=40) == {2: "resume", 1: "restart"}
    assert budget.spend(cut, pool=80, cost=40) == {2: "restart", 1: "restart"}
    assert budget.spend(cut, pool=100, cost=40) == {2: "restart", 1: "restart", 3: "resume"}


def test_a_task_begins_anew_so_often_and_no_more():
    cut = [Cut(1, 0.8, 0.1, 10, 2)]
    assert DynamicBudget(max_restarts=2).spend(cut, pool=100, cost=40) == {1: "resume"}
    assert DynamicBudget(max_restarts=3).spend(cut, pool=100, cost=40) == {1: "restart"}


def test_what_is_worth_nothing_gets_nothing():
    assert DynamicBudget().spend([Cut(1, -0.1, -0.2, 5, 0), Cut(2, 0.0, 0.0, 5, 0)], pool=1e6, cost=10) == {}


@hypothesis.given(
    cut=st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1), st.integers(1, 60), st.integers(0, 3)), max_size=8),
    pool=st.floats(-10, 200),
)
def test_no_more_is_spent_than_there_is(cut, pool):
    cut = [Cut(task, *seen) for task, seen in enumerate(cut)]
    plan = DynamicBudget().spend(cut, pool, cost=30.0)
    price = {"restart": lambda c: 30.0, "resume": lambda c: max(30.0 - c.tokens, 7.5)}
    assert sum(price[what](cut[task]) for task, what in plan.items()) <= max(pool, 0) + 1e-6


def test_no_drop_and_no_floor_reduce_to_the_fixed_budget():
    dynamic = DynamicBudget(steps=5, ease=0.0, drop=0.0, floor=-1e9, max_restarts=0)
    fixed = FixedBudget(steps=5)
    assert cut_after(dynamic, FELL) == cut_after(fixed, FELL) == (5, "allowance of 5 actions")


@hypothesis.given(
    values=st.lists(st.floats(0, 1), min_size=2, max_size=12), patience=st.integers(1, 4), drop=st.floats(0.1, 0.9)
)
def test_more_patience_or_a_lower_bar_never_cuts_sooner(values, patience, drop):
    def when(**options):
        end = cut_after(DynamicBudget(floor=0.0, **options), values)
        return math.inf if end is None else end[0]

    assert when(patience=patience, drop=drop) <= when(patience=patience + 1, drop=drop)
    assert when(patience=patience, drop=drop) <= when(patience=patience, drop=drop / 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"drop": 1.0}, "drop is 1.0"), ({"ease": -0.1}, "ease is -0.1"), ({"patience": 0}, "patience is 0"),
     ({"max_restarts": -1}, "max_restarts is -1"), ({"tokens": 0}, "tokens is 0"),
     ({"floor": math.nan}, "floor is nan")],
)  # fmt: skip
def test_budgets_that_make_no_sense_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        DynamicBudget(**options)


def attempt(budget, worth, turns=4, after=None):
    family = Letters(turns)
    played = play(
        Writer(family, lambda lane, prefix: "a;"),
        [(0, budgeted_attempt(family, family.instance("test", 0), budget, after=after, context=40))],
        width=1,
        temperature=1.0,
        value=lambda prefixes: np.array([worth[len(p)] for p in prefixes], np.float32),
    )
    return played[0]


def test_a_cut_attempt_is_truncated_by_us_and_its_values_are_those_where_actions_begin():
    worth = {1: 0.5, 4: 0.25, 7: 0.125}  # after `?`, `?a;-`, `?a;-a;-`
    played = attempt(DynamicBudget(drop=0.5, floor=0.0), worth)
    t = played.result.outcome
    assert (t.end, t.reason) == ("truncated", "value under 0.25 after 1 actions")
    assert played.result.cut == t.reason
    assert played.result.progress == Progress((0.5, 0.25, 0.125), 4)
    assert t.length == 7
    assert t.trainable  # every token is the policy's own draw
    assert played.sampled == 4


def test_an_attempt_that_its_task_ends_is_not_cut():
    played = attempt(FixedBudget(), {})
    assert (played.result.outcome.end, played.result.cut) == ("terminated", "")
    assert played.result.progress.tokens == played.sampled == 8
    assert attempt(FixedBudget(steps=2), {}).result.outcome.num_steps == 2


def test_a_cut_attempt_is_taken_up_where_it_was():
    cut = attempt(FixedBudget(steps=2), {}).result
    on = attempt(FixedBudget(), {}, after=cut)
    whole = attempt(FixedBudget(), {}).result
    assert on.sampled == 4
    assert (on.result.cut, on.result.progress.tokens) == ("", 8)
    for name in ("tokens", "action_mask", "rollout_logp", "rewards", "step_ids", "end"):
        np.testing.assert_array_equal(getattr(on.result.outcome, name), getattr(whole.outcome, name))
