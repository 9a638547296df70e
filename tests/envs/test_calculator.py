import asyncio
import concurrent.futures
import dataclasses
import itertools
import random

import hypothesis
import hypothesis.strategies as st
import pytest
from helpers import assert_answers_anything

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.envs.base import demonstration
from sao_jax.envs.calculator import (
    LEVELS,
    LIMIT,
    Calculator,
    Problem,
    answer,
    factors,
    mistake,
    results,
    substitute,
)

TEMPLATES = LEVELS[3]


def score(family, instance, turns) -> float:
    """Reward of a played attempt, by a fresh environment."""
    environment = family.environment()
    environment.reset(instance)
    return sum(environment.step(text).reward for text, is_action in turns if is_action)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_plan_of_a_template_computes_its_expression(template):
    numbers = (3, 5, 7, 2, 11, 13)[: len(factors(template))]
    assert results(TEMPLATES[template], numbers)[-1] == eval(substitute(template, numbers))


def test_factors_are_the_letters_next_to_a_product_sign():
    assert factors("a*(b+c)-d") == [True, False, False, False]
    assert factors("a*b+c*d") == [True] * 4
    assert factors("a+b*(c+d)") == [False, True, False, False]


def test_an_attempt_from_prompt_to_answer():
    family = Calculator()
    instance = dataclasses.replace(family.instance("train", 0), problem=Problem("a*(b+c)-d", (7, 12, 5, 9)))
    environment = family.environment()
    assert environment.reset(instance) == "7*(12+5)-9?"
    assert environment.step("<12+5>") == Outcome("=17;")
    assert environment.step("<7*17>") == Outcome("=119;")
    assert environment.step("<119-9>") == Outcome("=110;")
    assert environment.step("[110]") == Outcome("", 1.0, "terminated", "answer", {"answer": 1.0})


@pytest.mark.parametrize(
    "text", ["[111]", "[0110]", "[]", "]", "[110", "x[110]", "[[110]", "<110]", "[+110]", "[110 ]"]
)
def test_only_the_exact_answer_is_worth_anything(text):
    outcome = Calculator().respond(Problem("a*(b+c)-d", (7, 12, 5, 9)), [text])
    assert outcome.reward == 0
    assert outcome.end == ("terminated" if text.endswith("]") else None)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("<3+4>", "=7;"),
        ("<3-4>", "=-1;"),
        ("<-1*4>", "=-4;"),
        ("<5--3>", "=8;"),
        ("<99*99>", "=9801;"),
        ("<9999+1>", "=!;"),
        ("<-9999-1>", "=!;"),
        ("<9999-0>", "=9999;"),
        ("<10000+1>", "=!;"),
        ("<3+>", "=!;"),
        ("<+3>", "=!;"),
        ("<3/4>", "=!;"),
        ("<3+4+5>", "=!;"),
        ("3+4>", "=!;"),
        ("<3+4", "=!;"),
        ("<<3+4>", "=!;"),
        ("<\u0663+4>", "=!;"),  # a digit of another script
        ("<3+4>\n", "=!;"),
        ("", "=!;"),
    ],
)
def test_the_calculator_answers_every_call(call, said):
    assert answer(call) == said


def test_calling_for_ever_ends_at_the_turn_limit_without_reward():
    family = Calculator()
    environment = family.environment()
    environment.reset(family.instance("train", 0))
    outcomes = [environment.step("<1+1>") for _ in range(family.max_turns)]
    assert [o.end for o in outcomes] == [None] * (family.max_turns - 1) + ["terminated"]
    assert outcomes[-1] == Outcome("=2;", 0.0, "terminated", TURN_LIMIT)


@hypothesis.given(
    st.lists(st.text(max_size=12) | st.text(alphabet=Calculator.tokenizer.alphabet, max_size=9), max_size=9)
)
def test_nothing_that_a_policy_writes_raises(actions):
    assert_answers_anything(Calculator(), actions)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("max_number", [20, 99])
def test_the_expert_solves_every_instance_within_the_budget(level, max_number):
    family = Calculator(level=level, max_number=max_number, noise=0, skip=0)
    for index in range(300):
        for split in ("train", "test"):
            turns = demonstration(family, split, index, random.Random(index))
            text = "".join(part for part, _ in turns)
            assert len(family.tokenizer.encode(text)) <= family.max_tokens
            assert len([1 for _, is_action in turns if is_action]) <= family.max_turns
            assert score(family, family.instance(split, index), turns) == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_the_longest_solutions_fit_the_budget(level):
    """Lengths grow with the numbers, so the longest solutions are among the extremes of what can be drawn."""
    family = Calculator(level=level, max_number=99, noise=0, skip=0)
    longest = 0
    for template, plan in family.templates.items():
        choices = [(2, 9) if factor else (1, 99) for factor in factors(template)]
        for numbers in itertools.product(*choices):
            values = results(plan, numbers)
            assert max(values) <= LIMIT
            problem, actions, length = Problem(template, numbers), [], len(family.prompt(Problem(template, numbers)))
            while not actions or not actions[-1].endswith("]"):
                actions.append(family.expert(problem, actions, random.Random(0)))
                length += len(actions[-1]) + len(family.respond(problem, actions).observation)
            longest = max(longest, length)
    assert longest <= family.max_tokens
    assert longest > family.max_tokens * 0.7


def test_the_expert_finds_its_way_from_a_state_that_it_did_not_make():
    family = Calculator(noise=0, skip=0)
    for index in range(200):
        instance = family.instance("test", index)
        environment = family.environment()
        environment.restore(instance, ["<1+1>", "what>"])
        outcome = Outcome()
        while outcome.end is None:
            outcome = environment.step(environment.demonstrate(random.Random(0)))
        assert outcome.reward == 1.0


def test_a_refused_call_ends_a_spoilt_plan_with_what_is_known():
    family = Calculator(max_number=99, noise=1, skip=0, habit=1)
    problem = Problem("a+b*(c+d)", (87, 4, 43, 80))  # its mistake is the product of a and the sum
    actions = []
    while not actions or not actions[-1].endswith("]"):
        actions.append(family.expert(problem, actions, random.Random(0)))
    assert actions == ["<43+80>", "<87*123>", "[123]"]
    assert family.respond(problem, actions[:2]).observation == "=!;"


def test_splits_are_disjoint_and_instances_deterministic():
    family, again = Calculator(), Calculator()
    train = [family.instance("train", i).problem for i in range(5000)]
    test = [family.instance("test", i).problem for i in range(5000)]
    assert not set(train) & set(test)
    assert len(set(train)) > 3500
    assert train[:100] == [again.instance("train", i).problem for i in range(100)]


def test_values_of_instances_are_never_negative_and_numbers_within_range():
    family = Calculator(level=3, max_number=12)
    for index in range(500):
        problem = family.instance("train", index).problem
        assert min(results(family.templates[problem.template], problem.numbers)) >= 0
        for number, factor in zip(problem.numbers, factors(problem.template), strict=True):
            assert (2 if factor else 1) <= number <= (9 if factor else 12)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("habit", [0, 1])
def test_noise_spoils_the_share_of_plans_it_says_but_never_the_copying(level, habit):
    family = Calculator(level=level, noise=0.5, skip=0.2, habit=habit)
    solved = 0
    for index in range(1000):
        turns = demonstration(family, "train", index, random.Random(index))
        solved += score(family, family.instance("train", index), turns)
        assert sum(len(part) for part, _ in turns) <= family.max_tokens
        known = set()
        for part, is_action in turns:
            if is_action:
                assert numbers_in(part) <= known, turns
            else:
                known |= numbers_in(part)
    assert solved / 1000 == pytest.approx(0.5 * 0.8, abs=0.06)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_habitual_mistake_is_always_the_same_and_changes_the_result(template):
    family, plan = Calculator(level=3, noise=1, skip=0, habit=1), TEMPLATES[template]
    problem = Problem(template, (7, 5, 3, 2, 9, 8)[: len(factors(template))])
    played = []
    for seed in range(3):
        actions = []
        while not actions or not actions[-1].endswith("]"):
            actions.append(family.expert(problem, actions, random.Random(seed)))
        played.append(actions)
    assert played[0] == played[1] == played[2]
    assert played[0][-1] != f"[{results(plan, problem.numbers)[-1]}]"


def numbers_in(text: str) -> set[str]:
    """The unsigned numbers written in a text."""
    return set("".join(c if c.isdigit() else " " for c in text).split())


@pytest.mark.parametrize("template", TEMPLATES)
def test_mistakes_differ_from_the_plan_and_from_each_other(template):
    plan, rng, seen = TEMPLATES[template], random.Random(0), set()
    for _ in range(100):
        step, call = mistake(plan, template, rng)
        assert call != plan[step]
        assert len(call) == 3
        assert call[1] in "+-*"
        seen.add((step, call))
    assert {step for step, _ in seen} == set(range(len(plan)))
    assert len(seen) >= 6


def test_skipping_leaves_out_the_last_call():
    family = Calculator(noise=0, skip=1)
    for index in range(50):
        instance = family.instance("train", index)
        turns = demonstration(family, "train", index, random.Random(0))
        plan = family.templates[instance.problem.template]
        assert len([1 for _, is_action in turns if is_action]) <= len(plan)
        assert turns[-1] == (f"[{results(plan, instance.problem.numbers)[-2]}]", True)


def test_the_verifier_says_the_same_in_every_thread_and_in_a_coroutine():
    family = Calculator()
    instance = family.instance("train", 3)
    right = f"[{results(family.templates[instance.problem.template], instance.problem.numbers)[-1]}]"

    def reward(_=None):
        return family.respond(instance.problem, [right]).reward

    async def in_coroutine():
        return reward()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        rewards = [reward(), *pool.map(reward, range(100)), asyncio.run(in_coroutine())]
    assert rewards == [1.0] * 102


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(level=4), "level is 4; allowed: 1, 2, 3"),
        (dict(max_number=100), "allowed: 9 to 99"),
        (dict(noise=1.5), "noise is 1.5"),
        (dict(skip=-0.1), "skip is -0.1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Calculator(**options)
