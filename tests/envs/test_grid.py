import random

import hypothesis
import hypothesis.strategies as st
import pytest
from helpers import assert_answers_anything

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.envs.base import Instance, demonstration
from sao_jax.envs.grid import MIXED, Grid, limit, shortest, way

# @ starts, k is the key, g the goal:   @ # g
#                                       . # .
#                                       k . .
MAP = "@#g/.#./k.."


def live(problem=MAP, **options):
    environment = Grid(**options).environment()
    return environment, environment.reset(Instance("grid", "train", 0, problem))


def test_an_attempt_from_start_to_goal():
    environment, prompt = live()
    assert prompt == "-s" + "###" + "##" + "#.#"
    transcript = [
        ("e", "!", {}),
        ("s", "-s" + "#.#" + "##" + "#k.", {"keys": 0.0}),
        ("s", "en" + "#.#" + "#." + "###", {"keys": 1.0}),
        ("e", "en" + ".#." + ".." + "###", {"keys": 0.0}),
        ("e", "-n" + "#.#" + ".#" + "###", {"keys": 0.0}),
        ("n", "-n" + "#g#" + "##" + "..#", {"keys": 0.0}),
    ]
    for action, observation, parts in transcript:
        assert environment.step(action) == Outcome(observation, parts=parts)
    assert environment.step("n") == Outcome("", 1.0, "terminated", "goal", {"keys": 0.0})


def test_the_goal_is_closed_while_a_key_is_left():
    environment, prompt = live("@g/.k")
    assert prompt == "es" + "###" + "#g" + "#.k"
    assert environment.step("e") == Outcome("!")
    assert environment.step("s").observation == "e-" + "#.g" + "#k" + "###"
    assert environment.step("e").observation == "-n" + ".g#" + ".#" + "###"
    assert environment.step("n").reward == 1.0


def test_without_a_compass_and_with_a_wider_view():
    assert live(compass=False)[1] == "###" + "##" + "#.#"
    assert live(view=2)[1] == "-s" + "#####" + "#####" + "###g" + "##.#." + "##k.."


def test_whatever_else_is_written_is_a_lost_turn():
    environment, _ = live()
    for action in ("", "x", "ss", "S", " s"):
        assert environment.step(action) == Outcome("!")


def test_the_turns_of_an_attempt_follow_its_shortest_way():
    assert shortest(MAP) == "sseenn"
    assert limit(6) == 12
    environment, _ = live()
    outcomes = [environment.step("n") for _ in range(12)]
    assert [o.end for o in outcomes] == [None] * 11 + ["terminated"]
    assert outcomes[-1] == Outcome("!", 0.0, "terminated", TURN_LIMIT)


def test_a_goal_reached_with_the_last_turn_counts():
    environment, _ = live()
    outcomes = [environment.step(a) for a in "nnnnnn" + "sseenn"]
    assert outcomes[-1].reward == 1.0


def test_ways_are_shortest_and_go_round_a_closed_goal():
    assert way("...../.###./@.g../#####/#####", (2, 0), (2, 4), frozenset()) == "eeee"
    assert way("k..../.###./@.g../#####/#####", (2, 0), (2, 4), frozenset({(0, 0)})) == "nneeeess"
    assert way("@#/#.", (0, 0), (1, 1), frozenset()) is None


@pytest.mark.parametrize(
    "options", [dict(), dict(size=0), dict(size=8, keys=3), dict(size=6, keys=0, view=2, walls=0.4)]
)
def test_the_expert_solves_every_instance_the_shortest_way(options):
    family = Grid(noise=0, slip=0, **options)
    for split in ("train", "test"):
        for index in range(60):
            turns = demonstration(family, split, index, random.Random(index))
            moves = "".join(text for text, is_action in turns if is_action)
            assert turns[-1][1]
            assert len(moves) == len(shortest(family.instance(split, index).problem)) <= family.max_turns
            assert sum(len(text) for text, _ in turns) <= family.max_tokens


def test_the_longest_attempt_fits_the_budget():
    family = Grid(size=4, noise=0, slip=1)  # moves at random to the end
    for index in range(100):
        turns = demonstration(family, "train", index, random.Random(index))
        assert sum(len(text) for text, _ in turns) <= family.max_tokens
        assert len([1 for _, is_action in turns if is_action]) <= family.max_turns


def test_an_expert_without_eyes_for_walls_fails_where_one_is_in_its_way():
    family, ok = Grid(noise=1, slip=0), 0
    for index in range(200):
        turns = demonstration(family, "train", index, random.Random(index))
        ok += turns[-1][1]
        if not turns[-1][1]:
            assert turns[-1][0] == "!"
    assert 0.05 < ok / 200 < 0.6


@hypothesis.given(st.lists(st.text(max_size=2) | st.sampled_from("nesw"), max_size=30))
@hypothesis.settings(deadline=None, max_examples=50)
def test_nothing_that_a_policy_writes_raises(actions):
    assert_answers_anything(Grid(), actions)


def test_sizes_are_mixed_and_splits_disjoint():
    family = Grid(size=0)
    train = [family.instance("train", i).problem for i in range(200)]
    test = [family.instance("test", i).problem for i in range(200)]
    assert not set(train) & set(test)
    assert {len(problem.split("/")) for problem in train} == set(MIXED)
    assert all(problem.count("@") == problem.count("g") == problem.count("k") == 1 for problem in train)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(size=3), "size is 3; allowed: 4 to 16"),
        (dict(keys=4), "keys is 4"),
        (dict(walls=0.9), "walls is 0.9"),
        (dict(view=0), "view is 0"),
        (dict(slip=2), "slip is 2"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Grid(**options)
