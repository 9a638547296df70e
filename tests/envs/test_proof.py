import random
import time

import hypothesis
import hypothesis.strategies as st
import pytest
from helpers import assert_answers_anything

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.envs import kernel
from sao_jax.envs.base import Instance, demonstration
from sao_jax.envs.kernel import CONNECTIVES, SYMBOLS, equation, parse, proposition
from sao_jax.envs.proof import LEVELS, LOGICS, Proof, cut, heads, measured, view
from sao_jax.envs.proof_experts import TEMPLATES, advise_prop, advise_rewrite, computed, solution

KINDS = tuple(LOGICS)


def live(kind: str, problem: str):
    environment = Proof(kind=kind, noise=0, slip=0).environment()
    return environment, environment.reset(Instance("proof", "train", 0, problem))


def test_a_rewriting_proof_from_prompt_to_end():
    environment, prompt = live("rewrite", "=+ss0s0sss0")
    assert prompt == "=+ss0s0sss0?"
    assert environment.step("la") == Outcome("=l:s+s0", parts={"progress": pytest.approx(1 / 3)})
    assert environment.step("a") == Outcome("!", parts={"progress": 0.0})
    assert environment.step("dz") == Outcome("sl:ss0", parts={"progress": pytest.approx(1 / 3)})
    ending = environment.step("q")
    assert ending == Outcome("", 1.0, "terminated", "proved", {"progress": pytest.approx(1 / 3)})


def test_a_propositional_proof_from_prompt_to_end():
    environment, prompt = live("prop", ">&AB&BA")
    assert prompt == ">&AB&BA?"
    seen = [environment.step(action).observation for action in "i1ssx"]
    assert seen == ["1&AB:&BA", "1A2B:&BA", "1A2B:B", "!", "1A2B:A"]
    assert environment.step("x") == Outcome("", 1.0, "terminated", "proved", {"progress": 0.5})


def test_a_step_into_a_dead_end_can_be_taken_back():
    environment, _ = live("prop", ">A|AB")
    assert environment.step("b").observation == "!"  # nothing to take back
    assert [environment.step(a).observation for a in "irb"] == ["1A:|AB", "1A:B", "1A:|AB"]
    environment, _ = live("prop", ">A|AB")
    assert [environment.step(a).observation for a in "irxbl"] == ["1A:|AB", "1A:B", "!", "1A:|AB", "1A:A"]
    assert environment.step("x").reward == 1.0


def test_taking_back_also_takes_back_progress():
    environment, _ = live("prop", ">A&>BB|>CCA")  # the second part needs three steps
    actions = ["i", "s", "i", "x", "b", "x"]
    gained = [environment.step(a).parts["progress"] for a in actions]
    assert gained == [0, 0, 0, 0.5, -0.5, 0.5]


def test_an_attempt_ends_at_its_own_limit_of_turns():
    environment, _ = live("rewrite", "=+ss0s0sss0")  # three turns by the expert, three more to spare
    outcomes = [environment.step("q") for _ in range(6)]
    assert [o.end for o in outcomes] == [None] * 5 + ["terminated"]
    assert outcomes[-1] == Outcome("!", 0.0, "terminated", TURN_LIMIT, {"progress": 0.0})


def test_what_is_shown_stays_short():
    assert view(equation("=*ssss0sss0ssssssssssss0")) == "=*ssss"
    assert cut(equation("=*ssss0sss0ssssssssssss0").focus, 20) == "=*ssss~"
    assert heads(parse("+s+000", SYMBOLS), 2) == "+s0"
    assert view(proposition(">&AB&BA")) == ":>&AB&BA"
    assert view(proposition("&>&AB&BA>&AB&BA")) == ":&>&&>&&~"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", [1, 2, 3, 4, 0])
def test_the_expert_proves_every_instance_within_the_budget(kind, level):
    family = Proof(kind=kind, level=level, noise=0, slip=0)
    low, high = family.lengths[0][0], family.lengths[-1][1]
    for split in ("train", "test"):
        for index in range(60 if level != 4 else 10):
            turns = demonstration(family, split, index, random.Random(index))
            actions = [text for text, is_action in turns if is_action]
            assert sum(len(text) for text, _ in turns) <= family.max_tokens
            assert low <= len([a for a in actions if a[-1] != "."]) <= high
            assert len(actions) <= family.max_turns
            assert turns[-1][1]  # the last action is not answered: it ends the proof


@pytest.mark.parametrize("kind", KINDS)
def test_a_proof_of_more_than_two_thousand_steps_is_played_to_its_end_in_seconds(kind):
    family = Proof(kind=kind, level=7, noise=0, slip=0)
    start = time.process_time()
    environment, instance = family.environment(), family.instance("test", 0)
    tokens, steps, longest = len(environment.reset(instance)), 0, 0
    outcome = Outcome()
    progress = 0.0
    while outcome.end is None:
        action = environment.demonstrate(random.Random(0))
        outcome = environment.step(action)
        steps += action[-1] != "."
        tokens += len(action) + len(outcome.observation)
        longest = max(longest, len(outcome.observation))
        progress += outcome.parts["progress"]
    assert outcome.reward == 1.0
    assert 2000 < steps <= 2400
    assert progress == pytest.approx(1)
    assert tokens <= family.max_tokens
    assert longest <= 60
    assert time.process_time() - start < 10


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_can_be_asked_for(kind):
    for steps in (4, 25, 500):
        family = Proof(kind=kind, steps=steps, noise=0, slip=0)
        actions = [t for t, is_action in demonstration(family, "train", 1, random.Random(0)) if is_action]
        assert steps - steps // 5 <= len([a for a in actions if a[-1] != "."]) <= steps


@hypothesis.given(st.sampled_from(KINDS), st.lists(st.text(max_size=4) | st.text("lrudtzamoqcisx12b.", max_size=3)))
@hypothesis.settings(deadline=None, max_examples=40)
def test_nothing_that_a_policy_writes_raises(kind, actions):
    assert_answers_anything(Proof(kind=kind), actions)


@hypothesis.given(st.sampled_from(KINDS), st.integers(0, 50), st.integers(0, 2**32))
@hypothesis.settings(deadline=None, max_examples=150)
def test_the_expert_finds_its_way_from_a_state_that_it_did_not_make(kind, index, seed):
    family, rng = Proof(kind=kind, level=2, noise=0, slip=0), random.Random(seed)
    problem, logic = family.instance("train", index).problem, LOGICS[kind]
    environment = family.environment()
    environment.restore(Instance("proof", "train", index, problem), [])
    for _ in range(6):
        path = "".join(rng.choices("lrud", k=rng.randint(0, 2))) if kind == "rewrite" else ""
        state = environment._state
        if not logic.is_proved(state.proof):
            environment._state, _ = family.advance(problem, state, path + rng.choice(logic.stop))
    state = environment._state
    for _ in range(3000):
        if logic.is_proved(state.proof):
            return
        action = logic.advise(state.proof)
        after, outcome = family.advance(problem, state, action)
        assert outcome.observation != "!", (problem, action)
        state = after
    raise AssertionError("the expert goes round in circles")


def test_restoring_goes_on_like_the_first_attempt():
    family = Proof(kind="prop", level=2, noise=0, slip=0.3)
    instance = family.instance("train", 3)
    actions = [text for text, is_action in demonstration(family, "train", 3, random.Random(1)) if is_action]
    first, restored = family.environment(), family.environment()
    first.reset(instance)
    outcomes = [first.step(a) for a in actions]
    for done in range(len(actions)):
        restored.restore(instance, actions[:done])
        assert [restored.step(a) for a in actions[done:]] == outcomes[done:]
    assert family.respond(instance.problem, actions) == outcomes[-1]


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_is_a_theorem(template):
    sequent = proposition(template.translate(str.maketrans("pqr", "ABC")))[0]
    goals = (sequent,)
    for step in solution(sequent):
        goals = kernel.prove(goals, step)
    assert goals == ()


@pytest.mark.parametrize("formula", ["A", "|A>A0", ">>>ABAA", ">|AB&AB", ">>AB>BA", ">>>A00A"])
def test_what_is_no_theorem_has_no_proof(formula):
    assert solution(proposition(formula)[0]) is None
    assert advise_prop(proposition(formula)) == "b"


def test_the_length_of_a_computation_is_known_beforehand():
    for term, expected in (("+ss0sss0", (5, 4)), ("*ss0ss0", (4, 9)), ("*s00", (0, 1)), ("+s0+0s0", (2, 4))):
        assert computed(parse(term, SYMBOLS)) == expected
        state, steps = equation(f"={term}{'s' * expected[0]}0"), 0
        while not state.proved:
            action = advise_rewrite(state)
            steps += action[-1] not in "q."
            state = kernel.rewrite(state, action)
        assert steps == expected[1]


@pytest.mark.parametrize("kind", KINDS)
def test_splits_are_disjoint_and_instances_deterministic(kind):
    family = Proof(kind=kind)
    train = [family.instance("train", i).problem for i in range(300)]
    test = [family.instance("test", i).problem for i in range(300)]
    assert not set(map(family.split_key, train)) & set(map(family.split_key, test))
    assert len(set(train)) > 100
    assert train[:20] == [Proof(kind=kind).instance("train", i).problem for i in range(20)]


def test_the_same_theorem_written_in_another_way_is_in_the_same_split():
    prop, rewrite = Proof(kind="prop"), Proof(kind="rewrite", level=3)
    key = prop.split_key("&>&AB&BA>A|AC")
    assert key == (">&AB&BA", ">A|AB")
    assert prop.split_key("&>D|DE>&CF&FC") == key
    assert prop.split_key("&>D|ED>&CF&FC") != key
    assert rewrite.split_key("=+sss0ss0+s0ssss0") == rewrite.split_key("=+sss0ss0sssss0") == "=+sss0ss0sssss0"
    assert rewrite.split_key("=+ss0sss0sssss0") != rewrite.split_key("=+sss0ss0sssss0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", [1, 2])
def test_demonstrations_of_a_confused_expert_fail_and_fit(kind, level):
    family = Proof(kind=kind, level=level)
    ok = 0
    for index in range(400):
        turns = demonstration(family, "train", index, random.Random(index))
        ok += turns[-1][1]
        assert sum(len(text) for text, _ in turns) <= family.max_tokens
        family.tokenizer.encode("".join(text for text, _ in turns))
    assert 0.25 < ok / 400 < 0.65
    confused = Proof(kind=kind, noise=1, slip=0)
    turns = demonstration(confused, "train", 0, random.Random(0))
    due, taken = LOGICS[kind].confusion
    played = [text for text, is_action in turns if is_action]
    assert played[-1].endswith(taken)
    assert turns[-1][0] == "!"
    assert len(set(played[-3:])) == 1
    assert not any(text.endswith(due) for text in played)


def test_every_formula_of_a_propositional_goal_is_a_term():
    problem = Proof(kind="prop", level=3).instance("train", 0).problem
    assert parse(problem, CONNECTIVES)
    assert measured("prop", problem)[0] == len(
        [1 for _, a in demonstration(Proof("prop", 3, noise=0, slip=0), "train", 0, random.Random(0)) if a]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kind="lean"), "kind is 'lean'; allowed: rewrite, prop"),
        (dict(level=8), "level is 8; allowed: 1 to 7"),
        (dict(top=2), "top is 2; it needs level=0"),
        (dict(level=0, top=9), "top is 9"),
        (dict(steps=3), "steps is 3; allowed: 4 to 5000"),
        (dict(steps=10, level=2), "level has no effect with steps"),
        (dict(noise=2), "noise is 2; it is a share"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Proof(**options)


def test_levels_grow():
    bounds = [n for level in LEVELS.values() for n in level]
    assert bounds == sorted(bounds)
    assert bounds[0] == 4
    assert LEVELS[7][0] > 2000
