import random

import hypothesis
import hypothesis.strategies as st
import pytest
from helpers import assert_answers_anything

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.envs.base import Instance, demonstration
from sao_jax.envs.calculator import results
from sao_jax.envs.mathword import LARGEST, MAX_TOKENS, NAMES, MathWord, Problem

LEVELS = tuple(MAX_TOKENS)
STORY = "dan has how many nuts? ann has 7 nuts. cal eats 4 nuts. bob gives ann 5 nuts. dan has 3 fewer nuts than ann."
PROBLEM = Problem(STORY, (7, 5, 3, 4), ("a+b", "0-c"))


def tokens(family, turns) -> int:
    return sum(len(family.tokenizer.encode(text)) for text, _ in turns)


def replayed(family, instance, turns) -> float:
    environment = family.environment()
    environment.reset(instance)
    return sum(environment.step(text).reward for text, is_action in turns if is_action)


def test_an_attempt_from_story_to_answer():
    environment = MathWord(level=2).environment()
    assert environment.reset(Instance("mathword", "train", 0, PROBLEM)) == STORY
    assert environment.step("<7+5>") == Outcome("=12;")
    assert environment.step("<12-3>") == Outcome("=9;")
    assert environment.step("[9]") == Outcome("", 1.0, "terminated", "answer", {"answer": 1.0})


def test_a_wrong_call_uses_up_one_of_the_calls():
    environment = MathWord(level=2).environment()
    environment.reset(Instance("mathword", "train", 0, PROBLEM))
    said = [environment.step(call).observation for call in ("<7-5>", "<7+5>", "<12-3>", "<1+1>")]
    assert said == ["=2;", "=12;", "=!;", "=!;"]
    assert environment.step("<1+1>") == Outcome("=!;", end="terminated", reason=TURN_LIMIT)


@pytest.mark.parametrize("text", ["[8]", "[09]", "[]", "]", "[9", "[[9]", "<9]", "[9 ]", "nuts[9]", "[9]]"])
def test_only_the_exact_answer_is_worth_anything(text):
    outcome = MathWord().respond(PROBLEM, [text])
    assert outcome.reward == 0
    assert outcome.end == ("terminated" if text.endswith("]") else None)


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_solves_every_instance_within_the_budget(level):
    family = MathWord(level=level, noise=0, skip=0)
    for index in range(300):
        for split in ("train", "test"):
            turns = demonstration(family, split, index, random.Random(index))
            instance = family.instance(split, index)
            assert replayed(family, instance, turns) == 1.0
            assert tokens(family, turns) <= family.max_tokens
            assert len([1 for _, is_action in turns if is_action]) <= len(instance.problem.plan) + 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("habit", [0, 1])
def test_unreliable_demonstrations_fit_the_budget_and_fail_as_often_as_they_should(level, habit):
    family = MathWord(level=level, noise=0.5, skip=0.2, habit=habit)
    solved = 0
    for index in range(500):
        turns = demonstration(family, "train", index, random.Random(index))
        assert tokens(family, turns) <= family.max_tokens
        solved += replayed(family, family.instance("train", index), turns)
    # A wrong call may give the right result all the same: 2 * 2 is 2 + 2.
    assert solved / 500 == pytest.approx(0.42, abs=0.09)


@pytest.mark.parametrize("level", LEVELS)
def test_stories_have_as_many_steps_as_the_level_says(level):
    family, steps = MathWord(level=level), set()
    for index in range(300):
        problem = family.instance("train", index).problem
        values = results(problem.plan, problem.numbers)
        assert min(values) >= 0
        assert max(values) <= LARGEST
        steps.add(len(problem.plan))
    assert steps == ({level} if level else {1, 2, 3, 4})


def read(text: str) -> int:
    """Another reader: follows all amounts sentence by sentence, and answers."""
    has = {}
    question, story = text.split("?")
    for words in map(str.split, story.split(".")[:-1]):
        who, verb, thing = words[0], words[1], next(w for w in words if w in ("nuts", "eggs", "figs", "pears"))
        n = 2 if "twice" in words else int(next(w for w in words if w.isdigit()))
        own = has.get((who, thing), 0)
        if words[-1] in NAMES:
            other = has[words[-1], thing]
            value = other + n if "more" in words else other - n if "fewer" in words else other * n
        elif "bags" in words:
            value = n * int(words[5])
        elif verb == "gives":
            value = own - n
            has[words[2], thing] = has.get((words[2], thing), 0) + n
        else:
            value = own + n if verb == "buys" else own - n if verb == "eats" else n
        has[who, thing] = value
    *persons, thing = [w for w in question.split() if w not in ("and", "has", "have", "how", "many")]
    return sum(has[person, thing] for person in persons)


@pytest.mark.parametrize("level", LEVELS)
def test_the_plan_answers_what_the_story_asks(level):
    family = MathWord(level=level)
    for index in range(500):
        problem = family.instance("test", index).problem
        assert read(problem.text) == results(problem.plan, problem.numbers)[-1], problem.text


def test_splits_are_disjoint_instances_deterministic_and_hardly_ever_repeated():
    family, again = MathWord(), MathWord()
    train = [family.instance("train", i).problem for i in range(2000)]
    test = [family.instance("test", i).problem for i in range(2000)]
    assert not set(train) & set(test)
    assert len(set(train)) > 1950
    assert train[:100] == [again.instance("train", i).problem for i in range(100)]


@hypothesis.given(
    st.lists(st.text(max_size=9) | st.lists(st.integers(1, MathWord.tokenizer.vocab_size - 1)), max_size=9)
)
def test_nothing_that_a_policy_writes_raises_and_a_restored_attempt_goes_on_alike(actions):
    family = MathWord(level=2)
    texts = [action if isinstance(action, str) else family.tokenizer.decode(action) for action in actions]
    assert_answers_anything(family, texts)


@pytest.mark.parametrize("options", [dict(level=5), dict(noise=1.5), dict(skip=-0.1), dict(habit=2)])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is "):
        MathWord(**options)
