"""Arithmetic in words: read a short story, plan the calls of a calculator, read its answers.

    dan has how many nuts? ann has 7 nuts. cal eats 4 nuts. bob gives ann 5 nuts. dan has 3 fewer nuts than ann.
    <7+5>=12;<12-3>=9;[9]
    action obs ...    action

Calls and answers are those of `calculator`, but a story of n steps has n calls: the calculator answers `=!;` to
further ones, so that a first call that is wrong can rarely be made good. Sentences may be about others or other
things, and may refer to what was said before; the question comes first, so that a reader knows what to look for.
Only the right answer is worth anything: 1.
"""

import dataclasses
import random
from collections.abc import Sequence

from sao_jax.data.protocols import Outcome
from sao_jax.data.tokenizers import WordTokenizer
from sao_jax.envs.base import TaskFamily
from sao_jax.envs.calculator import ERROR, answer, follow, mistake, results

NAMES = ("ann", "bob", "cal", "dan", "eve")
THINGS = ("nuts", "eggs", "figs", "pears")
VERBS = ("has", "have", "buys", "eats", "gives")
WORDS = (*NAMES, *THINGS, *VERBS, "and", "bags", "of", "how", "many", "more", "fewer", "than", "times", "twice", "as")
LARGEST = 99  # no result on the right way is larger, or below zero
LETTERS = "abcdefghij"
MAX_TOKENS = {0: 128, 1: 56, 2: 80, 3: 104, 4: 128}

# What can happen to x, who has a number of things: the sentence, the operation, and whether the story goes on with y.
# y is someone new where it does, and may be anyone else where not.
_CHANGES = (
    ("{x} buys {n} {thing}.", "+", False),
    ("{y} gives {x} {n} {thing}.", "+", False),
    ("{x} eats {n} {thing}.", "-", False),
    ("{x} gives {y} {n} {thing}.", "-", False),
    ("{y} has {n} more {thing} than {x}.", "+", True),
    ("{y} has {n} fewer {thing} than {x}.", "-", True),
    ("{y} has {n} times as many {thing} as {x}.", "*", True),
    ("{y} has twice as many {thing} as {x}.", "*", True),
)
_SLIP = {"+": "-", "-": "*", "*": "+"}  # the habitual misreading


@dataclasses.dataclass(frozen=True)
class Problem:
    """`plan` computes the answer from `numbers` as in `calculator`: letters are numbers, digits earlier results."""

    text: str
    numbers: tuple[int, ...]
    plan: tuple[str, ...]


class MathWord(TaskFamily):
    """Word problems, and demonstrations by an expert whose planning can be made unreliable.

    Args:
      level: number of steps, 1 to 4; 0 draws it anew for each instance, so that difficulty differs between them.
      noise: share of demonstrations in which one call of the plan is wrong.
      skip: share of demonstrations that answer with what is known before the last call.
      habit: share of the wrong calls that misread the first step, always in the same way; the others are drawn anew.
    """

    name = "mathword"
    stop = ">]"
    tokenizer = WordTokenizer(WORDS, "0123456789.?<+-*>=;![]")

    def __init__(self, level: int = 1, noise: float = 0.55, skip: float = 0.1, habit: float = 1.0):
        if level not in MAX_TOKENS:
            raise ValueError(f"level is {level}; allowed: 1 to 4, or 0 for all of them")
        for name, share in (("noise", noise), ("skip", skip), ("habit", habit)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; it is a share, from 0 to 1")
        self.level, self.noise, self.skip, self.habit = level, noise, skip, habit
        self.max_tokens = MAX_TOKENS[level]
        self.max_turns = (level or 4) + 3

    def sample(self, rng: random.Random) -> Problem:
        steps = self.level or rng.randint(1, 4)
        while True:
            problem = tell(steps, rng)
            values = results(problem.plan, problem.numbers)
            if min(values) >= 0 and max(values) <= LARGEST:
                return problem

    def prompt(self, problem: Problem) -> str:
        return problem.text

    def respond(self, problem: Problem, actions: Sequence[str]) -> Outcome:
        action = actions[-1]
        if action.endswith("]"):
            right = float(action == f"[{results(problem.plan, problem.numbers)[-1]}]")
            return Outcome(reward=right, end="terminated", reason="answer", parts={"answer": right})
        return Outcome(observation=answer(action) if len(actions) <= len(problem.plan) else ERROR)

    def expert(self, problem: Problem, actions: Sequence[str], rng: random.Random) -> str:
        """The first call of the plan that has not been made yet, then the answer."""
        plan = list(problem.plan)
        wrong, skip = rng.random() < self.noise, rng.random() < self.skip
        if wrong and rng.random() < self.habit:
            left, operator, right = plan[0]
            plan[0] = left + _SLIP[operator] + right
        elif wrong:
            step, plan[step] = mistake(plan, LETTERS[: len(problem.numbers)], rng)
        if skip:
            plan.pop()
        return follow(plan, problem.numbers, actions)


def tell(steps: int, rng: random.Random) -> Problem:
    """A story of so many steps; its results may be of any size."""
    stranger, who, *new = rng.sample(NAMES, len(NAMES))
    thing, other_thing = rng.sample(THINGS, 2)
    sentences, numbers, plan = [], [], []

    def draw(low: int = 2, high: int = 9) -> str:
        numbers.append(rng.randint(low, high))
        return LETTERS[len(numbers) - 1]

    amount = draw()  # a letter of a number, or the index of a result
    if rng.random() < 0.25:
        plan.append(amount + "*" + draw())
        sentences.append(f"{who} has {numbers[0]} bags of {numbers[1]} {thing}.")
        amount = "0"
    else:
        sentences.append(f"{who} has {numbers[0]} {thing}.")
    met, amounts = [], {}  # who else was mentioned; what is known of those whom the story has left
    asked = None
    while len(plan) < steps:
        if new and len(plan) == steps - 1 and rng.random() < 0.2:
            asked = rng.choice(list(amounts) or new)
            if asked not in amounts:
                amounts[asked] = draw()
                sentences.append(f"{asked} has {numbers[-1]} {thing}.")
            plan.append(amount + "+" + amounts[asked])
            break
        sentence, operator, moves = rng.choice([c for c in _CHANGES if new or not c[2]])
        y = new.pop() if moves else rng.choice(met + new)
        number = draw(*((2, 2) if "twice" in sentence else (3, 4) if operator == "*" else (2, 9)))
        sentences.append(sentence.format(x=who, y=y, n=numbers[-1], thing=thing))
        plan.append(amount + operator + number)
        if moves:
            amounts[who] = amount
            met.append(who)
            who = y
        elif "{y}" in sentence:
            amounts.pop(y, None)  # no longer what it was
            if y in new:
                new.remove(y)
                met.append(y)
        amount = str(len(plan) - 1)
    persons = f"{who} and {asked} have" if asked else f"{who} has"
    # With two numbers alone there would be nothing to choose, and no mistake to make.
    for verb in rng.sample(("has", "buys", "eats"), rng.randint(1 if len(numbers) == 2 else 0, 2)):
        subject, item = rng.choice([(stranger, thing), (who, other_thing)])
        draw()
        sentences.insert(rng.randint(0, len(sentences)), f"{subject} {verb} {numbers[-1]} {item}.")
    return Problem(" ".join([f"{persons} how many {thing}?", *sentences]), tuple(numbers), tuple(plan))
