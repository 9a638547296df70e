import random

import hypothesis
import hypothesis.strategies as st
import pytest

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.envs.base import Instance, demonstration
from sao_jax.envs.dialogue import DISTANCES, GOALS, SHAPES, SLACK, SLOTS, WORDS, Dialogue, Problem

TURNS = (0, *SHAPES)
SCRIPT = (("open",), ("open",), ("chat", "sun today"), ("change", 0, 1), ("look",), ("recall", 1), ("open",), ("do",))
# The first values are hat, ann and cash; the hat becomes a bag, whose entry in the table is 7.
PROBLEM = Problem("refund", ("item", "name", "pay"), (0, 0, 0), (3, 7, 0, 1, 2, 4), SCRIPT)
RIGHT = ("ask item;", "ask name;", "ok;", "ok;", "look bag;", "ann;", "ask pay;", "refund bag ann cash 7;")


def played(*actions: str, problem: Problem = PROBLEM) -> list[Outcome]:
    family = Dialogue()
    return [family.respond(problem, actions[: n + 1]) for n in range(len(actions))]


def totals(outcomes) -> dict[str, float]:
    found = {}
    for outcome in outcomes:
        for name, value in outcome.parts.items():
            found[name] = found.get(name, 0.0) + value
    return found


def test_a_dialogue_from_prompt_to_refund():
    environment = Dialogue().environment()
    assert environment.reset(Instance("dialogue", "train", 0, PROBLEM)) == "refund. go on?"
    said = [environment.step(action) for action in RIGHT]
    assert [outcome.observation for outcome in said] == [
        "hat. go on?",
        "ann. sun today.",
        "not hat now bag.",
        "look up?",
        "7. name?",
        "go on?",
        "cash. do it.",
        "",
    ]
    assert [outcome.end for outcome in said] == [None] * 7 + ["terminated"]
    assert sum(outcome.reward for outcome in said) == 1.0
    parts = said[-1].parts
    assert (parts["goal"], parts["satisfaction"], parts["faults"]) == (1.0, 1.0, 0.0)


def test_recall_is_counted_by_the_exchanges_since_the_value_was_said():
    # bag (exchange 2) is needed in 4; ann (1) in 5; at last, in 7: bag, ann, cash (6) and the entry (4).
    asked = {"asked_k2": 2.0, "asked_k4": 2.0, "asked_k8": 2.0}
    parts = totals(played(*RIGHT))
    assert {name: value for name, value in parts.items() if name.startswith("asked")} == asked
    assert all(parts[name.replace("asked", "recalled")] == value for name, value in asked.items())
    wrong = totals(played("ask item;", "ask name;", "ok;", "ok;", "look hat;", "bob;", "ask pay;", "refund bag ann;"))
    assert {name: value for name, value in wrong.items() if name.startswith("asked")} == asked
    assert {name: value for name, value in wrong.items() if name.startswith("recalled")} == {
        "recalled_k2": 0.0,  # hat for bag; no cash
        "recalled_k4": 0.0,  # bob for ann; no entry
        "recalled_k8": 2.0,
    }


@pytest.mark.parametrize(
    ("action", "answer", "faults"),
    [
        ("ask color;", "no.", 1),
        ("ask item;", "told.", 1),
        ("refund hat ann cash 3;", "wait.", 1),
        ("book hat;", "wait.", 1),
        ("look hat;", "3.", 0),
        ("ask;", "what?", 0),
        ("ask item name;", "what?", 0),
        ("ask dog;", "what?", 0),
        ("look red;", "what?", 0),
        ("look;", "what?", 0),
        ("ok;", "what?", 0),
        ("ask  name;", "what?", 0),
        (" ask name;", "what?", 0),
        ("ask name", "what?", 0),
        (";", "what?", 0),
        ("", "what?", 0),
    ],
)
def test_what_does_not_fit_leaves_the_user_waiting(action, answer, faults):
    assert played("ask item;", action)[-1] == Outcome(f"{answer} go on?")
    outcomes = played(RIGHT[0], action, *RIGHT[1:])
    assert outcomes[-1].reward == pytest.approx(1 - 0.1 * faults)
    assert outcomes[-1].parts["faults"] == faults


def test_a_wrong_answer_is_passed_over_and_costs_satisfaction():
    outcomes = played(*RIGHT[:5], "bob;", *RIGHT[6:])
    assert outcomes[5].observation == "go on?"
    assert outcomes[-1].reward == pytest.approx(0.9)


def test_the_value_before_a_change_of_mind_is_wrong():
    last = played(*RIGHT[:-1], "refund hat ann cash 7;")[-1]
    assert (last.reward, last.end, last.parts["goal"]) == (0.5 * 4 / 5, "terminated", 0.0)
    last = played(*RIGHT[:4], "look hat;", *RIGHT[5:-1], "refund bag ann cash 3;")[-1]
    assert last.parts["goal"] == 0.0


def test_looking_again_finds_the_right_entry_and_costs_only_if_it_was_known():
    mended = played(*RIGHT[:4], "look hat;", *RIGHT[5:-1], "look bag;", RIGHT[-1])
    assert (mended[-2].observation, mended[-1].reward) == ("7. do it.", 1.0)
    again = played(*RIGHT[:-1], "look bag;", RIGHT[-1])
    assert again[-1].reward == pytest.approx(0.9)


def test_another_order_of_questions_does_as_well():
    actions = ("ask name;", "ask item;", "ok;", "ask pay;", "ok;", "look hat;", "hat;", "refund hat bob cash 3;")
    outcomes = played(*actions)
    assert outcomes[1].observation == "hat. sun today."
    assert outcomes[3].observation == "cash. not ann now bob."  # told beside the matter: the user says the last again
    assert outcomes[6].observation == "do it."  # nothing is left to ask
    assert outcomes[-1].reward == 1.0


def test_the_wrong_tool_ends_the_attempt_short_of_the_goal():
    last = played(*RIGHT[:-1], "send bag ann cash 7;")[-1]
    assert (last.reward, last.end) == (0.5 * 4 / 5, "terminated")
    assert played(*RIGHT[:-1], "send;")[-1].reward == 0.0
    assert played(*RIGHT[:-1], "refund bag ann cash 7 7;")[-1].reward == 0.5


def test_satisfaction_is_never_below_zero():
    family = Dialogue(turns=32, noise=0)
    instance = family.instance("train", 0)
    actions = ["ask gate;" if "gate" not in instance.problem.slots else "ask size;"] * 12
    while (outcome := family.respond(instance.problem, actions)).end is None:
        actions.append(family.expert(instance.problem, actions, random.Random(0)))
    assert (outcome.reward, outcome.parts["goal"], outcome.parts["satisfaction"]) == (0.0, 1.0, 0.0)


def test_an_attempt_that_does_not_come_to_the_point_ends():
    family = Dialogue()
    environment = family.environment()
    environment.reset(family.instance("train", 0))
    outcomes = [environment.step("what;") for _ in range(family.max_turns)]
    assert (outcomes[-1].end, outcomes[-1].reason, sum(o.reward for o in outcomes)) == ("terminated", TURN_LIMIT, 0)


@pytest.mark.parametrize("turns", TURNS)
def test_the_expert_satisfies_every_user_in_the_exchanges_that_the_dialogue_needs(turns):
    family, lengths = Dialogue(turns=turns, noise=0), set()
    for index in range(60):
        for split in ("train", "test"):
            actions, reward = demonstrated(family, split, index)
            assert reward == 1.0
            lengths.add(len(actions))
    assert lengths == ({turns} if turns else set(SHAPES))


@pytest.mark.parametrize("turns", SHAPES)
@pytest.mark.parametrize("habit", [0, 1])
def test_an_unreliable_expert_seldom_satisfies(turns, habit):
    family = Dialogue(turns=turns, noise=1, habit=habit)
    rewards = [demonstrated(family, "train", index)[1] for index in range(80)]
    # A change of mind may be taken back: then the first value is right again.
    assert sum(reward == 1.0 for reward in rewards) <= (0.15 if habit else 0.0) * len(rewards)
    assert sum(reward == pytest.approx(0.9) for reward in rewards) >= (0.0 if habit else 0.4) * len(rewards)


def demonstrated(family, split, index) -> tuple[list[str], float]:
    """The actions of a demonstration, which must fit the budget, and their reward."""
    turns = demonstration(family, split, index, random.Random(index))
    actions = [text for text, is_action in turns if is_action]
    assert sum(len(family.tokenizer.encode(text)) for text, _ in turns) <= family.max_tokens
    assert len(actions) <= family.max_turns
    return actions, family.respond(family.instance(split, index).problem, actions).reward


def test_the_expert_goes_on_from_any_state():
    family = Dialogue(turns=16, noise=0)
    for index in range(60):
        problem = family.instance("test", index).problem
        actions = [f"ask {problem.slots[-1]};", "what;", f"look {SLOTS[problem.slots[0]][0]};"]
        while (outcome := family.respond(problem, actions)).end is None:
            actions.append(family.expert(problem, actions, random.Random(0)))
        assert outcome.parts["goal"] == 1.0


def test_long_dialogues_need_what_was_said_long_ago():
    found = {}
    for turns in SHAPES:
        family, parts = Dialogue(turns=turns, noise=0), []
        for index in range(50):
            actions, _ = demonstrated(family, "train", index)
            problem = family.instance("train", index).problem
            parts += [family.respond(problem, actions[: n + 1]) for n in range(len(actions))]
        found[turns] = totals(parts)
        for name, value in found[turns].items():
            if name.startswith("asked"):
                assert found[turns][name.replace("asked", "recalled")] == value
    assert found[8].keys() & {f"asked_k{d}" for d in DISTANCES} == {"asked_k2", "asked_k4", "asked_k8"}
    assert found[16]["asked_k16"] > 50
    assert found[32]["asked_k32"] > 50


def test_the_words_are_known_and_values_belong_to_one_slot():
    values = [value for slot in SLOTS.values() for value in slot]
    assert len(set(values)) == len(values)
    assert not set(values) & (set(SLOTS) | set(GOALS))
    assert len(WORDS) == len(set(WORDS))
    assert all(len(slots) == len(set(slots)) >= max(s.slots for s in SHAPES.values()) for slots in GOALS.values())


def test_splits_are_disjoint_instances_deterministic_and_hardly_ever_repeated():
    family, again = Dialogue(), Dialogue()
    train = [family.instance("train", i).problem for i in range(1000)]
    test = [family.instance("test", i).problem for i in range(500)]
    assert not set(train) & set(test)
    assert len(set(train)) > 990
    assert train[:50] == [again.instance("train", i).problem for i in range(50)]


PHRASES = st.lists(st.sampled_from([*WORDS, "7", "?"]), max_size=6).map(" ".join).map("{};".format)


@hypothesis.given(st.lists(st.text(max_size=9) | PHRASES | st.sampled_from(RIGHT), max_size=8 + SLACK))
def test_nothing_that_a_policy_writes_raises_and_a_restored_attempt_goes_on_alike(actions):
    family = Dialogue()
    instance, done = Instance("dialogue", "train", 0, PROBLEM), []
    environment = family.environment()
    environment.reset(instance)
    for action in actions:
        restored = family.environment()
        restored.restore(instance, done)
        outcome = environment.step(action)
        assert restored.step(action) == outcome
        family.tokenizer.encode(outcome.observation)
        assert 0 <= outcome.reward <= 1
        done.append(action)
        if outcome.end:
            break


@pytest.mark.parametrize("options", [dict(turns=9), dict(noise=1.5), dict(habit=-1), dict(values=7), dict(values=1)])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is "):
        Dialogue(**options)
