import concurrent.futures
import functools
import itertools
import random

import hypothesis
import hypothesis.strategies as st
import pytest
from helpers import assert_answers_anything

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.envs import contest
from sao_jax.envs.base import demonstration
from sao_jax.envs.contest import LEVELS, Contest, Problem, mistake, outputs_of, reference

LINE = Problem(1, 0, (3, 7))
PLANE = Problem(2, 0, (2, 3, 1))
SUM = Problem(3, 0, (3, 5))


@functools.cache
def all_shown(level: int) -> dict[Problem, tuple[int, ...]]:
    """All problems of a level, with their outputs on the inputs shown."""
    problems = (
        Problem(level, form, constants)
        for form, f in enumerate(LEVELS[level].forms)
        for constants in itertools.product(*(range(first, last + 1) for first, last in f.ranges))
    )
    return {problem: tuple(outputs_of(reference(problem), LEVELS[level].shown)) for problem in problems}


def test_an_attempt_from_prompt_to_submission():
    family = Contest()
    assert family.prompt(LINE) == "0>7 100>307?"
    assert family.respond(LINE, ["?2*x+7;"]) == Outcome("=7,207;")
    assert family.respond(LINE, ["?2*x+7;", "?3*x+7;"]) == Outcome("=7,307;")
    parts = {"solved": 1.0, "hidden_share": 1.0}
    assert family.respond(LINE, ["!3*x+7;"]) == Outcome("", 1.0, "terminated", "submitted", parts)


def test_prompts_of_the_other_levels():
    assert Contest(level=2).prompt(PLANE) == "0,0>1 100,0>201 0,100>301 100,100>501?"
    assert Contest(level=3).prompt(SUM) == "0>5 1>5 2>8 3>14 4>23?"


@pytest.mark.parametrize(
    ("problem", "program"),
    [
        (LINE, "7+x*3"),
        (LINE, "x+x+x+7"),
        (LINE, "s=7\nfor i in range(3):s=s+x"),
        (PLANE, "y+x+x+y+y+1"),
        (SUM, "5+sum(3*i for i in range(x))"),
        (SUM, "s=5\nfor i in range(x):\n s+=i\n s+=i+i"),
        (SUM, "5+3*x*(x-1)//2"),
    ],
)
def test_any_program_with_the_right_outputs_is_right(problem, program):
    assert Contest().respond(problem, [f"!{program};"]).reward == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "2*x+7",
        "7if x<1else 307",  # knows what was shown, and no more
        "[7,10,13][x]",
        "",
        "x+",
        "s",
        "y*0+3*x+7",  # there is no y
        "3.0*x+7.5",
        "9**9**9**9",
        "3*x+7\ns=1",
        "1\nraise SystemExit",
        "str(3*x+7)",
        "(3*x+7,)",
        "type('A',(),{'__eq__':lambda a,b:True})()",
        "1)\nimport os\nos._exit(0",
        "print(3*x+7)",
        "(" * 500 + "x" + ")" * 500,
        "\0",
        "\ud800",
    ],
)
def test_everything_else_is_wrong_and_harmless(program):
    outcome = Contest().respond(LINE, [f"!{program};"])
    assert (outcome.reward, outcome.end) == (0.0, "terminated")


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("x*3", "=0,300;"),
        ("0-x", "=0,-100;"),
        ("700//x", "=!,7;"),
        ("7/1", "=!,!;"),
        ("x<1", "=!,!;"),
        ("999999+x", "=999999,!;"),
        ("", "=!,!;"),
        ("x x", "=!,!;"),
        ("9**9**9**9", "=!,!;"),
    ],
)
def test_a_trial_shows_integers_of_six_digits(program, shown):
    outcome = Contest().respond(LINE, [f"?{program};"])
    assert outcome == Outcome(observation=shown)
    Contest.tokenizer.encode(shown)


@pytest.mark.parametrize("action", ["", ";", "3*x+7;", "!3*x+7", "?", "?3", "=3;", "\n;"])
def test_what_is_neither_trial_nor_submission_is_said_so(action):
    assert Contest().respond(LINE, [action]) == Outcome("=!;")


def test_trying_for_ever_ends_at_the_turn_limit_without_reward():
    family = Contest()
    environment = family.environment()
    environment.reset(family.instance("train", 0))
    outcomes = [environment.step("?1;") for _ in range(family.max_turns)]
    assert [o.end for o in outcomes] == [None] * (family.max_turns - 1) + ["terminated"]
    assert outcomes[-1] == Outcome("=1,1;", 0.0, "terminated", TURN_LIMIT)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.lists(
        st.text(max_size=12)
        | st.builds("{}{};".format, st.sampled_from("?!"), st.text(alphabet=Contest.tokenizer.alphabet, max_size=9)),
        max_size=4,
    )
)
def test_nothing_that_a_policy_writes_raises(actions):
    assert_answers_anything(Contest(), actions)


@pytest.mark.parametrize("level", LEVELS)
def test_the_examples_shown_tell_all_programs_apart(level):
    """So no prompt has two right answers, and a train problem is no test problem under another name."""
    assert len(set(all_shown(level).values())) == len(all_shown(level)) > 5000


@pytest.mark.parametrize("level", LEVELS)
def test_hidden_inputs_are_not_shown_and_shown_outputs_fit_an_observation(level):
    assert not set(LEVELS[level].shown) & set(LEVELS[level].hidden)
    assert all(contest._show(value) != "!" for values in all_shown(level).values() for value in values)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("habitual", [True, False])
def test_a_mistake_is_one_and_its_trial_shows_it(level, habitual):
    rng = random.Random(0)
    for problem in rng.sample(list(all_shown(level)), 2000):
        wrong = mistake(problem, habitual, rng)
        assert tuple(outputs_of(wrong, LEVELS[level].shown)) != all_shown(level)[problem]


@pytest.mark.parametrize("level", [0, *LEVELS])
def test_the_expert_solves_what_it_is_given_within_the_budget(level):
    family = Contest(level=level, noise=0, skip=0)
    for index in range(30):
        turns = demonstration(family, "test", index, random.Random(index))
        assert [text[0] for text, is_action in turns if is_action] == ["?", "!"]
        environment = family.environment()
        environment.reset(family.instance("test", index))
        assert sum(environment.step(text).reward for text, is_action in turns if is_action) == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_the_longest_attempts_with_two_trials_fit_the_budget(level):
    family, longest = Contest(level=level), 0
    inputs = sum(len(",".join(map(str, each)) + "> ") for each in LEVELS[level].shown)
    for problem, outputs in all_shown(level).items():
        values = len(",".join(map(str, outputs)))
        prompt = inputs + values - len(outputs) + 1
        longest = max(longest, prompt + 3 * len(f"?{reference(problem)};") + 2 * (values + len("=;")))
    assert prompt == len(family.prompt(problem))
    assert 0.7 * family.max_tokens < longest <= family.max_tokens


@pytest.mark.parametrize("habit", [0, 1])
def test_the_stated_share_of_demonstrations_is_right(habit):
    family, right = Contest(noise=0.7, skip=0.6, habit=habit), 0
    for index in range(1000):
        problem = family.instance("train", index).problem
        actions = []
        while not actions or actions[-1][0] == "?":
            actions.append(family.expert(problem, actions, random.Random(index)))
        right += actions[-1] == f"!{reference(problem)};"
    assert right / 1000 == pytest.approx(1 - 0.7 * 0.6, abs=0.05)


def test_the_expert_corrects_what_its_trial_has_shown():
    family = Contest(noise=1, skip=0)
    assert family.expert(LINE, [], random.Random(0)) == "?3*x*x+7;"
    assert family.expert(LINE, ["?3*x*x+7;"], random.Random(0)) == "!3*x+7;"
    assert Contest(noise=1, skip=1).expert(LINE, [], random.Random(0)) == "!3*x*x+7;"


def test_level_0_mixes_levels_and_each_instance_has_one():
    family = Contest(level=0)
    levels = [family.instance("train", index).problem.level for index in range(300)]
    assert {level: levels.count(level) > 60 for level in LEVELS} == dict.fromkeys(LEVELS, True)
    assert family.max_tokens == max(level.max_tokens for level in LEVELS.values())


def test_splits_are_disjoint_and_instances_deterministic():
    family = Contest(level=0)
    train = {family.instance("train", index).problem for index in range(2000)}
    test = {family.instance("test", index).problem for index in range(2000)}
    assert not train & test
    assert len(train) > 800
    assert [Contest(level=0).instance("test", i) for i in range(9)] == [family.instance("test", i) for i in range(9)]


def test_verdicts_are_the_same_in_every_thread(monkeypatch):
    monkeypatch.setattr(contest, "_run", contest._run_once.__wrapped__)  # every one is run
    programs = ["3*x+7", "3*x+8", "x+", "[7,10,13][x]"] * 10
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        rewards = list(pool.map(lambda program: Contest().respond(LINE, [f"!{program};"]).reward, programs))
    assert rewards == [1.0, 0.0, 0.0, 0.0] * 10


def test_a_policy_cannot_reach_the_right_outputs():
    """They are not in the program's process: whatever it searches there, it finds inputs alone."""
    program = "s=[o for o in __import__('gc').get_objects() if type(o) is list and 43 in o]\ns=len(s)"
    assert 43 in outputs_of(reference(LINE), LEVELS[1].hidden)
    assert Contest().respond(LINE, [f"?{program};"]).observation == "=0,0;"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(level=4), "level is 4; allowed: 1, 2, 3, or 0"),
        (dict(noise=1.5), "noise is 1.5"),
        (dict(skip=-0.1), "skip is -0.1"),
        (dict(habit=2), "habit is 2"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Contest(**options)
