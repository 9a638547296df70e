import random
import time

import hypothesis
import hypothesis.strategies as st
import pytest
from helpers import assert_answers_anything

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.envs.base import Instance, demonstration
from sao_jax.envs.repair import (
    ERROR,
    FILES,
    INPUTS,
    LEVELS,
    Problem,
    Repair,
    call_path,
    changes,
    parse,
    root_value,
)

PROBLEM = Problem(broken=("x-3", "a(x)*2"), right=("x+3", "a(x)*2"), visible=(2,), told=True)
ALL_LEVELS = (0, *LEVELS)


def answered(*actions, problem=PROBLEM) -> Outcome:
    return Repair().respond(problem, actions)


def test_an_attempt_from_prompt_to_submission():
    environment = Repair().environment()
    assert environment.reset(Instance("repair", "train", 0, PROBLEM)) == "b(2)=10?"
    transcript = [
        ("list;", "a,b."),
        ("view b;", "a(x)*2."),
        ("view a;", "x-3."),
        ("test;", "b(2)=-2 not 10."),
        ("edit a=x*3;", "ok."),
        ("test;", "b(2)=12 not 10."),
        ("edit a=x+3;", "ok."),
        ("test;", "pass."),
    ]
    for action, observation in transcript:
        assert environment.step(action) == Outcome(observation)
    parts = {"visible": 1.0, "hidden": 1.0}
    assert environment.step("submit;") == Outcome("", 1.0, "terminated", "submitted", parts)


def test_the_harder_prompt_says_only_that_a_test_fails():
    problem = Problem(PROBLEM.broken, PROBLEM.right, (2, 5), told=False)
    assert Repair(level=3).prompt(problem) == "fail?"
    assert answered("edit b=a(x)+11;", "test;", problem=problem).observation == "b(5)=13 not 16."


def test_hidden_tests_catch_a_repair_for_the_visible_one_only():
    for edit in ("edit b=10;", "edit a=5;", "edit b=a(x)+11;", "edit b=x+8;"):
        assert answered(edit, "test;").observation == "pass."
        outcome = answered(edit, "submit;")
        assert (outcome.reward, dict(outcome.parts)) == (0.0, {"visible": 1.0, "hidden": 0.0})


def test_any_repair_that_is_right_everywhere_counts():
    assert answered("edit b=2*(x+3);", "submit;").reward == 1.0
    assert answered("edit b=x+x+6;", "submit;").reward == 1.0


def test_submitting_without_a_repair_earns_nothing():
    assert answered("submit;") == Outcome("", 0.0, "terminated", "submitted", {"visible": 0.0, "hidden": 0.0})


@pytest.mark.parametrize(
    "action",
    [
        *(
            "",
            ";",
            "list",
            "list;;",
            "list a;",
            "view;",
            "view c;",
            "view x;",
            "view ab;",
            "view a",
            "test a;",
            "Submit;",
        ),
        *("edit a;", "edit a=;", "edit a=x+;", "edit a=x3;", "edit a=03;", "edit a=-x;", "edit a=(x;", "edit a=x);"),
        *("edit a=a(x);", "edit a=b(x);", "edit b=c(x);", "edit b=b(x);", "edit c=x;", "edit b=ax;", "edit b=a;"),
        *("edit a=x x;", "edit a=x**2;", "edit a=x\n;", "edit a=x+1234567890123456;", "edit a=a.b;", "edit a=\u0663;"),
        *(
            "edit  a=x;",
            "edit a=x",
            "edit a=x;;",
            "edit a =x;",
            " edit a=x;",
            "edit a=()x;",
            "edit a=a();",
            "edit a=()",
        ),
    ],
)
def test_what_is_no_action_is_an_error_and_changes_nothing(action):
    assert answered(action) == Outcome(ERROR)
    assert answered(action, "view a;").observation == "x-3."


def test_values_out_of_bounds_are_shown_as_such():
    assert answered("edit a=9999*x;", "test;").observation == "b(2)=! not 10."
    assert answered("edit a=99999;", "test;").observation == "b(2)=! not 10."
    assert answered("edit a=9999*x;", "submit;").reward == 0.0


def test_a_repository_that_calls_too_often_is_stopped_soon():
    files = ("x", *(f"{f}({f}({f}({f}(x))))" for f in FILES[:5]))
    start = time.perf_counter()
    assert all(root_value(files, x) is None for x in INPUTS)
    assert time.perf_counter() - start < 0.5


EXPRESSIONS = st.recursive(
    st.sampled_from("x") | st.integers(0, 12).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map("".join),
        inner.map("({})".format),
        inner.map("a({})".format),
    ),
    max_leaves=5,
)


@hypothesis.given(EXPRESSIONS, st.integers(0, 9))
def test_bodies_mean_what_they_mean_in_python(body, x):
    hypothesis.assume(parse(body) is not None)
    value = root_value(("x*2-1", body), x)
    expected = eval(body, {"x": x, "a": lambda x: x * 2 - 1})
    assert value == expected or (value is None and ("*" in body or "a" in body))


@hypothesis.given(EXPRESSIONS)
def test_every_short_expression_is_read(body):
    assert (parse(body) is not None) == (len(body) <= 16)


@pytest.mark.parametrize("level", ALL_LEVELS)
@pytest.mark.parametrize("skip", [0, 1])
def test_the_expert_solves_every_instance_within_the_budget(level, skip):
    family = Repair(level=level, noise=0, skip=skip)
    for index in range(40 if skip else 120):
        for split in ("train", "test"):
            assert played(family, split, index) == 1.0


@pytest.mark.parametrize("level", ALL_LEVELS)
@pytest.mark.parametrize("habit", [0, 1])
def test_an_unreliable_expert_fails_where_it_does_not_test(level, habit):
    family = Repair(level=level, noise=1, skip=0, habit=habit)
    assert all(played(family, "train", index) for index in range(100))
    family = Repair(level=level, noise=1, skip=1, habit=habit)
    assert not any(played(family, "train", index) for index in range(100))


def played(family, split, index) -> float:
    """The reward of a demonstration, which must fit the budget."""
    turns = demonstration(family, split, index, random.Random(index))
    actions = [text for text, is_action in turns if is_action]
    assert sum(len(family.tokenizer.encode(text)) for text, _ in turns) <= family.max_tokens
    assert len(actions) <= family.max_turns
    return family.respond(family.instance(split, index).problem, actions).reward


def test_the_expert_finds_its_way_from_a_state_that_it_did_not_make():
    family = Repair(level=2, noise=0)
    for index in range(100):
        environment = family.environment()
        environment.restore(family.instance("test", index), ["edit c=x;", "what;"])
        outcome = Outcome()
        while outcome.end is None:
            outcome = environment.step(environment.demonstrate(random.Random(0)))
        assert outcome.reward == 1.0


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_one_change_alone_repairs_a_repository(level):
    family = Repair(level=level)
    for index in range(60):
        problem = family.instance("train", index).problem
        callees = len(problem.right) > 2
        repairs = [
            action
            for action, _ in changes(problem.broken, call_path(problem.broken), callees)
            if family.respond(problem, [action, "test;"]).observation == "pass."
        ]
        assert len(repairs) == 1
        assert family.respond(problem, [*repairs, "submit;"]).reward == 1.0
        assert family.respond(problem, ["test;"]).observation != "pass."


def test_levels_have_the_files_and_the_depth_that_they_say():
    for level, shape in LEVELS.items():
        problems = [Repair(level=level).instance("train", index).problem for index in range(60)]
        assert {len(p.right) for p in problems} == set(shape.files)
        assert {len(call_path(p.right)) for p in problems} == set(shape.depth)
        assert {p.told for p in problems} == {shape.told}


def test_splits_are_disjoint_and_instances_deterministic():
    family, again = Repair(), Repair()
    train = [family.instance("train", i).problem for i in range(1000)]
    test = [family.instance("test", i).problem for i in range(1000)]
    assert not {p.right for p in train} & {p.right for p in test}  # neither with other tests nor with another bug
    assert len(set(train)) > 900
    assert train[:50] == [again.instance("train", i).problem for i in range(50)]


ACTIONS = st.one_of(
    st.text(max_size=9),
    st.lists(st.integers(1, Repair.tokenizer.vocab_size - 1), max_size=12).map(Repair.tokenizer.decode),
    st.sampled_from(["list;", "test;", "view a;", "view b;", "view c;"]),
    st.text(alphabet="abx09+-*()", max_size=9).map("edit b={};".format),
)


@hypothesis.given(st.lists(ACTIONS, max_size=9).flatmap(lambda actions: st.just([*actions, "submit;"])))
def test_nothing_that_a_policy_writes_raises_and_a_restored_attempt_goes_on_alike(actions):
    assert_answers_anything(Repair(), actions)


def test_looking_for_ever_ends_at_the_turn_limit_without_reward():
    family = Repair()
    environment = family.environment()
    environment.reset(family.instance("train", 0))
    outcomes = [environment.step("list;") for _ in range(family.max_turns)]
    assert outcomes[-1] == Outcome("a,b.", 0.0, "terminated", TURN_LIMIT)


@pytest.mark.parametrize("options", [dict(level=5), dict(noise=1.5), dict(skip=-0.1), dict(habit=2)])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is "):
        Repair(**options)
