"""Value-guided search over scripted actions and values, worked by hand."""

import numpy as np
import pytest
from scripted_attempts import Letters, Writer

from sao_jax.data.trajectory import Trajectory
from sao_jax.rollout.agents import Failure
from sao_jax.rollout.guided import Search, guided_attempt, valued_prefix
from sao_jax.rollout.lanes import Drawn, play


def search(family, write, worth, **options):
    """(result, texts that were valued). `worth(text)` is the critic."""
    valued = []

    def value(prefixes):
        texts = [family.tokenizer.decode(p) for p in prefixes]
        valued.extend(texts)
        return np.array([worth(text) for text in texts], np.float32)

    how = Search(**options)
    attempt = guided_attempt(family, family.instance("test", 0), how, context=40)
    engine = Writer(family, write)
    (played,) = play(engine, [(0, attempt)], width=how.width, temperature=1.0, value=value)
    assert not engine.rows  # all rows were given back
    return played, valued


def text_of(family, t):
    return family.tokenizer.decode(t.tokens)


def test_best_of_n_takes_the_action_of_the_highest_value_and_shows_the_environment_nothing_else():
    family = Letters()
    played, valued = search(family, lambda lane, _: "abc"[lane] + ";", lambda t: t.count("b"), candidates=3)
    assert text_of(family, played.result) == "?b;-b;"
    # Where the stop token is chosen, with the letter written.
    assert valued == ["?a", "?b", "?c", "?b;-a", "?b;-b", "?b;-c"]
    assert family.seen == ["b;", "b;b;"]
    assert played.sampled == 12


def test_the_reward_is_not_looked_at():
    family = Letters(turns=1)
    played, _ = search(family, lambda lane, _: "ad"[lane] + ";", lambda t: t.count("a"), candidates=2)
    assert text_of(family, played.result) == "?a;"
    assert played.result.total_reward == 0


def test_after_the_observation_every_candidate_has_its_own_branch_and_an_end_is_valued_before_its_answer():
    family = Letters()
    _, valued = search(family, lambda lane, _: "ab"[lane] + ";", lambda t: t.count("a"), candidates=2,
                       after="observation")  # fmt: skip
    assert valued == ["?a;-", "?b;-", "?a;-a", "?a;-b"]
    assert sorted(family.seen) == ["a;", "a;a;", "a;b;", "b;"]


def test_a_beam_keeps_what_is_best_in_the_end():
    """`a` looks better than `b` at first, but only `b` is followed by anything good."""
    family = Letters()

    def write(lane, prefix):
        return ("a;", "b;")[lane % 2] if prefix == "?" else ("c;", "d;")[lane % 2]

    worth = {"?a": 0.6, "?b": 0.5, "?a;-c": 0.1, "?a;-d": 0.2, "?b;-c": 0.3, "?b;-d": 0.9}.get
    best, _ = search(family, write, worth, candidates=2)
    beam, _ = search(family, write, worth, candidates=2, beam=2)
    assert text_of(family, best.result) == "?a;-d;"
    assert text_of(family, beam.result) == "?b;-d;"
    assert beam.result.rewards.tolist() == [0, 0, 0, 0, 0, 1]


def test_equal_candidates_take_one_place_of_a_beam():
    family = Letters()

    def write(lane, prefix):
        return ("a;", "a;", "b;", "b;")[lane] if prefix == "?" else ("c;", "d;")[lane % 2]

    def worth(t):
        return {"?a": 2.0, "?b": 1.0}.get(t, 3.0 if t == "?b;-d" else 0.0)

    played, valued = search(family, write, worth, candidates=4, beam=2)
    assert valued[:2] == ["?a", "?b"]
    assert text_of(family, played.result) == "?b;-d;"


def test_granularity_two_values_pairs_of_actions():
    family = Letters(turns=4)

    def write(lane, prefix):
        return ("a;", "b;")[lane] if prefix.count(";") % 2 == 0 else "c;"

    played, valued = search(family, write, lambda t: t.count("b"), candidates=2, granularity=2)
    assert valued == ["?a;-c", "?b;-c", "?b;-c;-a;-c", "?b;-c;-b;-c"]
    assert text_of(family, played.result) == "?b;-c;-b;-c;"


def test_a_candidate_that_the_environment_fails_on_is_passed_over_where_others_have_a_branch():
    family = Letters()
    played, _ = search(family, lambda lane, _: "xa"[lane] + ";", lambda t: t.count("x"), candidates=2,
                       after="observation")  # fmt: skip
    assert text_of(family, played.result) == "?a;-a;"
    played, _ = search(family, lambda lane, _: "xa"[lane] + ";", lambda t: t.count("x"), candidates=2)
    assert isinstance(played.result, Failure)


def test_what_comes_out_says_that_the_critic_chose():
    family = Letters()
    played, _ = search(family, lambda lane, _: "a;", lambda t: 0.0, candidates=2)
    assert isinstance(played.result, Trajectory)
    assert played.result.sampler == "value-guided best of 2, granularity 1, valued after the action"
    assert not played.result.trainable


@pytest.mark.parametrize(("options", "name"), [({"candidates": 1}, "candidates"), ({"beam": 0}, "beam")])
def test_a_search_without_choice_is_refused(options, name):
    with pytest.raises(ValueError, match=f"{name} is"):
        Search(**({"candidates": 2} | options))


@pytest.mark.parametrize(
    ("action", "done", "length"),
    [([3, 5], "stop", 4), ([3, 5], "length", 5), ([5], "stop", 5)],
    ids=["at the stop token", "cut off", "nothing but the stop token"],
)
def test_where_an_action_is_valued(action, done, length):
    drawn = Drawn(np.array(action), np.zeros(len(action)), np.zeros(len(action), int), done)
    assert len(valued_prefix(np.arange(5), drawn)) == length
