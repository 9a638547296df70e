import random

import hypothesis
import hypothesis.strategies as st
import pytest

from sao_jax.envs.arithmetic import Arithmetic
from sao_jax.envs.base import demonstration


@pytest.mark.parametrize(
    ("kind", "problem", "right"),
    [("sort", "5281", "1258;"), ("reverse", "5281", "1825;"), ("max", "5281", "8;"), ("add", "5281+4900", "10181;")],
)
def test_the_right_answer_of_each_kind(kind, problem, right):
    family = Arithmetic(kind)
    assert family.respond(problem, [right]).reward == 1.0
    assert family.respond(problem, [right[:-1]]).reward == 0.0
    assert family.respond(problem, ["0" + right]).reward == 0.0
    assert family.expert(problem, (), random.Random(0)) == right


def test_partial_reward_is_the_share_of_right_characters():
    family = Arithmetic("sort", partial=True)
    outcome = family.respond("5281", ["1251;"])
    assert outcome.reward == 0.8
    assert outcome.parts == {"exact": 0.0, "share": 0.8}
    assert family.respond("5281", ["1258;1258;"]).reward == 0.5  # writing more is not worth more
    assert family.respond("5281", [""]).reward == 0.0


@pytest.mark.parametrize("kind", ["sort", "reverse", "max", "add"])
@pytest.mark.parametrize("digits", [2, 4, 8])
def test_the_expert_solves_every_instance_within_the_budget(kind, digits):
    family = Arithmetic(kind, digits)
    for index in range(200):
        (prompt, _), (answer, is_action) = demonstration(family, "test", index, random.Random(index))
        assert is_action
        assert len(family.tokenizer.encode(prompt + answer)) <= family.max_tokens
        environment = family.environment()
        environment.reset(family.instance("test", index))
        outcome = environment.step(answer)
        assert (outcome.reward, outcome.end) == (1.0, "terminated")


def test_splits_are_disjoint():
    family = Arithmetic()
    train = {family.instance("train", i).problem for i in range(5000)}
    assert not train & {family.instance("test", i).problem for i in range(5000)}


def test_noisy_demonstrations_have_one_wrong_digit():
    family = Arithmetic(noise=0.5)
    right = []
    for index in range(400):
        answer = demonstration(family, "train", index, random.Random(index))[-1][0]
        wrong = sum(
            a != b for a, b in zip(answer, "".join(sorted(family.instance("train", index).problem)) + ";", strict=True)
        )
        assert wrong <= 1
        right.append(wrong == 0)
    assert sum(right) / 400 == pytest.approx(0.5, abs=0.1)


@hypothesis.given(st.text(max_size=20), st.sampled_from(["sort", "reverse", "max", "add"]), st.booleans())
def test_nothing_that_a_policy_writes_raises(text, kind, partial):
    family = Arithmetic(kind, partial=partial)
    outcome = family.respond(family.instance("train", 0).problem, [text])
    assert 0 <= outcome.reward <= 1
    assert outcome.end == "terminated"


def test_options_out_of_range_are_refused():
    with pytest.raises(ValueError, match="allowed: sort, reverse, max, add"):
        Arithmetic("divide")
    with pytest.raises(ValueError, match="2 to 8"):
        Arithmetic(digits=9)
    with pytest.raises(ValueError, match="noise is 2"):
        Arithmetic(noise=2)
