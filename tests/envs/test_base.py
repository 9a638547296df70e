import concurrent.futures
import dataclasses
import random

import pytest

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.data.tokenizers import CharTokenizer
from sao_jax.envs import base
from sao_jax.envs.base import TaskFamily, canonical, demonstration


class Guess(TaskFamily):
    """Find a number from 0 to 9; the answer to a guess is `<` or `>`; half a point for a guess next to it."""

    name, stop, max_tokens, max_turns = "guess", ";", 32, 4
    tokenizer = CharTokenizer("0123456789?<>;")

    def sample(self, rng):
        return rng.randrange(10)

    def prompt(self, problem):
        return "?"

    def respond(self, problem, actions):
        guess = int(actions[-1][:-1])
        if guess == problem:
            return Outcome(reward=1.0, end="terminated", reason="found")
        return Outcome(observation=">" if problem > guess else "<", reward=0.5 * (abs(guess - problem) == 1))

    def expert(self, problem, actions, rng):
        start = rng.randrange(10)
        return f"{[start, problem][bool(actions)]};"


class Constant(TaskFamily):
    name, stop, max_tokens, max_turns = "constant", ";", 8, 1
    tokenizer = CharTokenizer("a;")

    def sample(self, rng):
        return "a"


def test_instances_are_deterministic_and_named():
    first, again = Guess().instance("train", 5), Guess().instance("train", 5)
    assert first == again
    assert first.id == "guess/train/5"


def test_instances_are_the_same_on_every_machine():
    # Golden values: a change here changes every recorded run.
    assert [Guess().instance("train", i).problem for i in range(8)] == [2, 4, 7, 5, 5, 7, 7, 7]


def test_no_problem_is_in_both_splits():
    train = {Guess().instance("train", i).problem for i in range(200)}
    test = {Guess().instance("test", i).problem for i in range(200)}
    assert train
    assert test
    assert not train & test
    assert train | test == set(range(10))


def test_a_split_without_problems_is_an_error_and_an_unknown_one_too():
    empty = "test" if not Constant()._is_test("a") else "train"
    with pytest.raises(ValueError, match=f"no {empty} problem"):
        Constant().instance(empty, 0)
    with pytest.raises(ValueError, match="allowed: train, test"):
        Constant().instance("validation", 0)


def test_the_turn_limit_terminates_with_the_reward_earned():
    family = Guess()
    instance = dataclasses.replace(family.instance("train", 0), problem=7)
    environment = family.environment()
    assert environment.reset(instance) == "?"
    for _ in range(3):
        assert environment.step("0;") == Outcome(observation=">")
    assert environment.step("8;") == Outcome("<", 0.5, "terminated", TURN_LIMIT)
    with pytest.raises(RuntimeError, match="attempt is over"):
        environment.step("7;")
    environment.reset(instance)
    assert environment.step("7;").reason == "found"


def test_a_restored_attempt_goes_on_like_the_first():
    family = Guess()
    instance = family.instance("train", 1)
    actions = ["0;", "9;", "0;", "9;"]
    first = family.environment()
    first.reset(instance)
    outcomes = [first.step(a) for a in actions]
    for done in range(len(actions)):
        other = family.environment()
        other.restore(instance, actions[:done])
        assert [other.step(a) for a in actions[done:]] == outcomes[done:]


def test_the_expert_decides_once_per_attempt():
    family = Guess()
    environment = family.environment()
    environment.reset(family.instance("train", 1))
    rng = random.Random(0)
    assert environment.demonstrate(rng) == environment.demonstrate(rng)
    environment.reset(family.instance("train", 1))
    assert {environment.reset(family.instance("train", 1)) and environment.demonstrate(rng) for _ in range(50)} == {
        f"{i};" for i in range(10)
    }


def test_a_demonstration_alternates_and_ends():
    for index in range(20):
        turns = demonstration(Guess(), "train", index, random.Random(index))
        assert turns[0] == ("?", False)
        assert turns[-1] == (f"{Guess().instance('train', index).problem};", True)


def test_a_task_without_an_expert_says_so():
    with pytest.raises(NotImplementedError, match="'constant' has no scripted expert"):
        Constant().expert("a", (), random.Random(0))


def test_the_example_in_the_documentation_works():
    code = "\n".join(line[4:] for line in base.__doc__.splitlines() if line.startswith("    ") or not line)
    scope = {"TaskFamily": TaskFamily, "CharTokenizer": CharTokenizer, "Outcome": Outcome}
    exec(code, scope)
    environment = scope["Echo"]().environment()
    prompt = environment.reset(scope["Echo"]().instance("train", 0))
    assert environment.step(prompt[:-1] + ";") == Outcome(reward=1.0, end="terminated")


def test_equal_problems_have_equal_text():
    @dataclasses.dataclass
    class Problem:
        b: int
        a: tuple

    assert canonical(Problem(1, (2, 3))) == canonical({"a": [2, 3], "b": 1}) == '{"a":[2,3],"b":1}'
    with pytest.raises(TypeError):
        canonical(object())


def test_rewards_are_the_same_from_any_thread():
    family = Guess()
    instance = family.instance("train", 0)

    def attempt(_):
        environment = family.environment()
        environment.reset(instance)
        return environment.step(f"{instance.problem};").reward

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(attempt, range(200))) == [1.0] * 200
