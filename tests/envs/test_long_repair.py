import random
import time
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest
from helpers import assert_answers_anything

from sao_jax.data.protocols import Outcome
from sao_jax.envs.base import Instance
from sao_jax.envs.long_repair import BUGS, LongRepair
from sao_jax.envs.repository import (
    CALLS,
    ERROR,
    LONGEST,
    Problem,
    define,
    hidden_tests_pass,
    run_tests,
    to_repair,
    value,
)

SWAP = Problem(
    kind="swap",
    target=3,
    extra=0,
    files=(("f3(y,x)=x*2-y", "f5(x)=f3(4,x)+1"), ("f30(x)=x+3", "f7(x)=f3(x,4)+1", "f8(x)=f3(x,1)")),
    repairs=((1, 1, "f7(x)=f3(4,x)+1"), (1, 2, "f8(x)=f3(1,x)")),
    callers=("f5", "f7", "f8"),
    visible=(("f7", 5),),
)
# Everywhere the new name, but for the definition.
RENAME = Problem(
    kind="rename",
    target=3,
    extra=0,
    files=(("f3(x,y)=x*2-y", "f30(x)=x+3"), ("f7(x)=g3(x,4)+1", "f5(x)=g3(x,2)")),
    repairs=((0, 0, "g3(x,y)=x*2-y"),),
    callers=("f7", "f5"),
    visible=(("f7", 5),),
)
ADD = Problem(
    kind="add",
    target=3,
    extra=6,
    files=(("f3(x,y,z)=x*2-y+z", "f5(x)=f3(x,2,6)"), ("f7(x)=f3(x,4)+1", "f6(x)=x")),
    repairs=((1, 0, "f7(x)=f3(x,4,6)+1"),),
    callers=("f7", "f5"),
    visible=(("f7", 5),),
)


def answered(*actions, problem=SWAP) -> Outcome:
    return LongRepair().respond(problem, actions)


def test_an_attempt_from_prompt_to_submission():
    environment = LongRepair().environment()
    assert environment.reset(Instance("long-repair", "train", 0, SWAP)) == "swap f3?"
    transcript = [
        ("list;", "1:2,2:3."),
        ("find f3;", "1:2,2:2."),
        ("find 2:f3;", "2:f7(x)=f3(x,4)+1.3:f8(x)=f3(x,1)."),
        ("view 1:2;", "2:f5(x)=f3(4,x)+1."),
        ("test;", "f7(5)=4 not=7."),
        ("edit 2:2=f7(x)=f3(4,x)+1;", "ok."),
        ("test;", "pass."),
        ("edit 2:3=f8(x)=f3(1,x);", "ok."),
        ("find 2:f3;", "2:f7(x)=f3(4,x)+1.3:f8(x)=f3(1,x)."),
    ]
    for action, observation in transcript:
        assert environment.step(action) == Outcome(observation)
    parts = {"visible": 1.0, "hidden": 1.0}
    assert environment.step("submit;") == Outcome("", 1.0, "terminated", "submitted", parts)


def test_a_call_site_that_no_visible_test_reaches_is_judged_by_the_hidden_ones():
    outcome = answered("edit 2:2=f7(x)=f3(4,x)+1;", "submit;")
    assert (outcome.reward, dict(outcome.parts)) == (0.0, {"visible": 1.0, "hidden": 0.0})


def test_the_definition_as_it_was_before_the_change_is_no_repair():
    # All call sites taken back: the functions are right among themselves, but f3 is called by its new form.
    actions = ("edit 1:1=f3(x,y)=x*2-y;", "edit 1:2=f5(x)=f3(x,4)+1;", "submit;")
    outcome = answered(*actions)
    assert (outcome.reward, dict(outcome.parts)) == (0.0, {"visible": 1.0, "hidden": 0.0})


def test_what_was_right_must_stay_so():
    repaired = ("edit 2:2=f7(x)=f3(4,x)+1;", "edit 2:3=f8(x)=f3(1,x);")
    assert answered(*repaired, "edit 2:1=f30(x)=3+x;", "submit;").reward == 1.0
    assert answered(*repaired, "edit 2:1=f30(x)=x+4;", "submit;").reward == 0.0
    assert answered(*repaired, "edit 2:1=f31(x)=x+3;", "submit;").reward == 0.0
    assert answered(*repaired, "edit 2:1=f5(x)=x;", "submit;").reward == 0.0


def test_a_renaming_goes_through_a_file_and_touches_no_longer_name():
    assert LongRepair().prompt(RENAME) == "rename f3=g3?"
    assert answered("test;", problem=RENAME).observation == "f7(5)=! not=7."
    assert answered("find f3;", problem=RENAME).observation == "1:1."
    assert answered("replace 1:f3=g3;", problem=RENAME).observation == "1."
    assert answered("replace 1:f3=g3;", "find f3;", problem=RENAME).observation == "0."
    assert answered("replace 1:f3=g3;", "view 1:1;", problem=RENAME).observation == "1:g3(x,y)=x*2-y.2:f30(x)=x+3."
    assert answered("replace 1:f3=g3;", "submit;", problem=RENAME).reward == 1.0
    assert answered("replace 2:g3=f3;", "test;", problem=RENAME).observation == "pass."
    assert answered("replace 2:g3=f3;", "submit;", problem=RENAME).reward == 0.0


def test_another_number_of_arguments_has_no_value():
    assert LongRepair().prompt(ADD) == "add f3,6?"
    assert answered("test;", problem=ADD).observation == "f7(5)=! not=13."
    assert answered("edit 2:1=f7(x)=f3(x,4,6)+1;", "submit;", problem=ADD).reward == 1.0
    assert answered("edit 2:1=f7(x)=f3(x,4,5)+1;", "submit;", problem=ADD).reward == 0.0


@pytest.mark.parametrize(
    "action",
    [
        *("", ";", "list", "list;;", "view 1;", "view 3:1;", "view 1:3;", "view 0:1;", "view 1:0;", "find f;"),
        *("find 1:3;", "find x;", "find f03;", "test 1;", "Submit;", "edit 1:1;", "edit 1:1=;", "edit 1:1=x;"),
        *("edit 1:3=f1(x)=x;", "edit 3:1=f1(x)=x;", "edit 1:1=f1(x)=;", "edit 1:1=f1()=1;", "edit 1:1=f1(x,x)=x;"),
        *("edit 1:1=f1(x)=y;", "edit 1:1=f1(x)=f2;", "edit 1:1=f1(x)=f2();", "edit 1:1=f1(x)=f2(x,);"),
        *("edit 1:1=h1(x)=x;", "edit 1:1=f1(x)=x-;", "edit 1:1=f1(x)=(x;", "edit 1:1=f1(x)=-x;", "edit 1:1=f1(xy)=x;"),
        *("edit 1:1=f01(x)=x;", "edit 1:1=f1(x)=x\n;", "edit 1:1=f1(x)=03;", "edit 1:1=f1(x)=\u0663;"),
        "edit 1:1=f1(x)=" + "x+" * LONGEST + "x;",
        *("replace 3:f3=g3;", "replace 1:f3=x;", "replace 1:f3=g3", "replace 1:f3;", "replace f3=g3;"),
    ],
)
def test_what_is_no_action_is_an_error_and_changes_nothing(action):
    assert answered(action) == Outcome(ERROR)
    assert answered(action, "view 1:1;").observation == "1:f3(y,x)=x*2-y.2:f5(x)=f3(4,x)+1."


def test_observations_are_bounded():
    lines = tuple(f"f{i}(x)=f3(4,x)+{i}" for i in range(10, 40))
    problem = Problem("swap", 3, 0, (("f3(y,x)=x-y", *lines), ("f1(x)=x",)), (), ("f10",), ())
    shown = answered("find 1:f3;", problem=problem).observation
    assert shown == "1:f3(y,x)=x-y." + "".join(f"{i - 8}:f{i}(x)=f3(4,x)+{i}." for i in range(10, 15)) + "+25."
    assert answered("find 2:f3;", problem=problem).observation == "0."
    assert answered("find 9:f3;", problem=problem).observation == "0."
    assert answered("view 1:30;", problem=problem).observation == "30:f38(x)=f3(4,x)+38.31:f39(x)=f3(4,x)+39."


def test_functions_that_call_each_other_for_ever_or_too_often_have_no_value_and_are_stopped_soon():
    loop = "edit 1:2=f5(x)=f5(x)+f5(x)+f5(x)+f5(x)+f5(x);"
    assert answered(loop, "edit 2:2=f7(x)=f5(x);", "test;").observation == "f7(5)=! not=7."
    deep = (("f3(y,x)=x", "f0(x)=x", *(f"f{i}(x)=" + "+".join([f"f{i - 1}(x)"] * 5) for i in range(1, 8))), ())
    problem = Problem("swap", 3, 0, deep, (), (), ())
    start = time.perf_counter()
    assert value(problem, {}, "f2", (1,)) == 25
    assert CALLS < 5**4
    assert value(problem, {}, "f4", (1,)) is None
    assert value(problem, {}, "f7", (1,)) is None
    nested = "f5(x)=" + "f5(" * 10 + "x" + ")" * 10
    assert len(nested) > LONGEST or define(nested)
    assert time.perf_counter() - start < 0.5


SIZES = [(2, 8, 30), (2, 9, 10), (3, 12, 20), (5, 300, 4)]


@pytest.mark.parametrize(("files", "lines", "count"), SIZES)
@pytest.mark.parametrize("bug", BUGS)
def test_the_expert_solves_every_instance_within_the_budget(files, lines, count, bug):
    for skip in (0, 1):
        family = LongRepair(files, lines, bug, noise=0, skip=skip)
        for index in range(count):
            for split in ("train", "test"):
                assert played(family, split, index) == 1.0


@pytest.mark.parametrize("bug", ["rename", "signature"])
def test_the_largest_repository_is_repaired_within_seconds(bug):
    family = LongRepair(20, 5000, bug, noise=0, skip=0)
    start = time.process_time()
    assert played(family, "train", 0) == 1.0
    assert time.process_time() - start < 5
    problem = family.sample(random.Random(1))
    assert [len(lines) for lines in problem.files] == [250] * 20


@pytest.mark.parametrize("bug", ["rename", "signature"])
@pytest.mark.parametrize("habit", [0, 1])
def test_an_unreliable_expert_fails_where_it_does_not_test(bug, habit):
    family = LongRepair(4, 24, bug, noise=1, skip=1, habit=habit)
    assert not any(played(family, "train", index) for index in range(60))
    family = LongRepair(4, 24, bug, noise=1, skip=0, habit=habit)
    assert 0.3 < sum(played(family, "train", index) for index in range(60)) / 60 < 1


def played(family, split, index) -> float:
    """The reward of an attempt by the expert, which must fit the budget."""
    environment, instance, rng = family.environment(), family.instance(split, index), random.Random(index)
    texts, actions, outcome = [environment.reset(instance)], 0, Outcome()
    while outcome.end is None:
        action = environment.demonstrate(rng)
        outcome = environment.step(action)
        texts += [action, outcome.observation]
        actions += 1
    assert sum(len(family.tokenizer.encode(text)) for text in texts) <= family.max_tokens
    assert actions <= family.max_turns
    assert outcome.reason == "submitted"
    return outcome.reward


def test_the_expert_finds_its_way_from_a_state_that_it_did_not_make():
    family = LongRepair(3, 12, noise=0, skip=0)
    for index in range(60):
        environment, instance = family.environment(), family.instance("test", index)
        last = len(instance.problem.files[2])
        environment.restore(instance, [f"edit 3:{last}=f1(x)=x;", "what;", f"replace 1:{instance.problem.old}=g0;"])
        outcome = Outcome()
        while outcome.end is None:
            outcome = environment.step(environment.demonstrate(random.Random(0)))
        # Where no visible test shows what was spoilt, the expert does not know of it.
        assert outcome.reward == 1.0 or outcome.parts == {"visible": 1.0, "hidden": 0.0}


@pytest.mark.parametrize("bug", BUGS)
def test_problems_are_what_they_are_said_to_be(bug):
    family, definitions, kinds = LongRepair(3, 20, bug), 0, set()
    for index in range(50):
        problem = family.instance("train", index).problem
        kinds.add(problem.kind)
        right = {(file, line): text for file, line, text in problem.repairs}
        assert [len(lines) for lines in problem.files] == [7, 7, 6]
        assert to_repair(problem, {}) == list(problem.repairs)
        assert run_tests(problem, {}) != "pass."
        assert run_tests(problem, right) == "pass."
        assert hidden_tests_pass(problem, right)
        for missing in right:  # every repair is needed
            assert not hidden_tests_pass(problem, {place: text for place, text in right.items() if place != missing})
        texts = [right.get((f, i), text) for f, lines in enumerate(problem.files) for i, text in enumerate(lines)]
        functions = {text.split("(")[0]: text for text in texts}
        assert len(functions) == 20
        compiled = as_python(functions)
        for name, text in functions.items():
            assert (name in problem.callers) == (f"{problem.new}(" in text.split("=")[1])
            if name != problem.new:
                assert all(value(problem, right, name, (x,)) == compiled[name](x) for x in (0, 3, 9))
        definitions += len(problem.repairs) == 1
    assert kinds == set(BUGS[bug])
    assert 3 < definitions < 25


def as_python(functions: dict[str, str]) -> dict[str, Callable[..., int]]:
    """The functions by Python's own reading of these generated lines."""
    scope = {}
    for name, text in functions.items():
        head, _, body = text.partition("=")
        scope[name] = eval(f"lambda {head[head.index('(') + 1 : -1]}: {body}", scope)
    return scope


def test_splits_are_disjoint_instances_deterministic_and_hardly_ever_repeated():
    family, again = LongRepair(), LongRepair()
    train = [family.instance("train", i).problem for i in range(300)]
    test = [family.instance("test", i).problem for i in range(200)]
    assert not set(train) & set(test)
    assert len(set(train)) == 300
    assert train[:30] == [again.instance("train", i).problem for i in range(30)]


ACTIONS = st.one_of(
    st.text(max_size=9),
    st.lists(st.integers(1, LongRepair.tokenizer.vocab_size - 1), max_size=9).map(LongRepair.tokenizer.decode),
    st.sampled_from(["list;", "test;", "submit;", "find f3;", "replace 1:f1=g1;", "replace 2:f1=f2;"]),
    st.builds("find {}:f{};".format, st.integers(0, 9), st.integers(0, 9)),
    st.builds("view {}:{};".format, st.integers(0, 9), st.integers(0, 9)),
    st.builds("edit {}:{}=f{}(x)=f{}(x)*9999;".format, *[st.integers(0, 7)] * 4),
)


@hypothesis.given(st.lists(ACTIONS, max_size=9))
def test_nothing_that_a_policy_writes_raises_and_a_restored_attempt_goes_on_alike(actions):
    assert_answers_anything(LongRepair(), actions)


@pytest.mark.parametrize(
    "options",
    [dict(files=1), dict(files=21), dict(lines=7), dict(lines=5001), dict(bug="typo"), dict(noise=2), dict(skip=-1)],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is "):
        LongRepair(**options)
