"""Arithmetic with a calculator: plan the calls, copy the numbers, read the answers.

    7*(12+5)-9?<12+5>=17;<7*17>=119;<119-9>=110;[110]
    prompt      action obs ...                  action

A call is `<a+b>`, `<a-b>` or `<a*b>` with integers of at most four digits; the calculator answers `=value;`, or `=!;`
where the call is malformed or its value has more than four digits. The answer is `[value]`, ends the attempt, and
is worth 1 if it is the value of the expression, written without leading zeros, and 0 otherwise.
"""

import dataclasses
import random
import re
from collections.abc import Sequence

from sao_jax.data.protocols import Outcome
from sao_jax.data.tokenizers import CharTokenizer
from sao_jax.envs.base import TaskFamily

ALPHABET = "0123456789+-*()=?<>;[]!"
LIMIT = 9999  # largest magnitude of a number
ERROR = "=!;"

_CALL = re.compile(r"<(-?[0-9]{1,4})([-+*])(-?[0-9]{1,4})>")

# Expression -> the calls that compute it; a lower-case letter is a number of the prompt, a digit the result of an
# earlier call. Factors (see `factors`) stay below 10, so that no value exceeds the limit.
_TWO_CALLS = {
    "a+b+c": ("a+b", "0+c"),
    "a+b-c": ("a+b", "0-c"),
    "a-b+c": ("a-b", "0+c"),
    "a-b-c": ("a-b", "0-c"),
    "a-(b-c)": ("b-c", "a-0"),
    "a*b+c": ("a*b", "0+c"),
    "a*b-c": ("a*b", "0-c"),
    "a+b*c": ("b*c", "a+0"),
    "a*(b+c)": ("b+c", "a*0"),
    "a*(b-c)": ("b-c", "a*0"),
}
_THREE_CALLS = {
    "a+b+c-d": ("a+b", "0+c", "1-d"),
    "a*(b+c)-d": ("b+c", "a*0", "1-d"),
    "a*(b-c)+d": ("b-c", "a*0", "1+d"),
    "a*b+c*d": ("a*b", "c*d", "0+1"),
    "a+b*(c+d)": ("c+d", "b*0", "a+1"),
    "a*b-(c-d)": ("a*b", "c-d", "0-1"),
}
_FIVE_CALLS = {
    "a*(b+c)-d*(e-f)": ("b+c", "a*0", "e-f", "d*2", "1-3"),
    "a*b+c*(d+e)-f": ("a*b", "d+e", "c*1", "0+2", "3-f"),
    "a*(b+c*(d-e))+f": ("d-e", "c*0", "b+1", "a*2", "3+f"),
}
LEVELS = {1: _TWO_CALLS, 2: _TWO_CALLS | _THREE_CALLS, 3: _TWO_CALLS | _THREE_CALLS | _FIVE_CALLS}


@dataclasses.dataclass(frozen=True)
class Problem:
    template: str
    numbers: tuple[int, ...]


class Calculator(TaskFamily):
    """Calculator problems, and demonstrations by an expert whose planning can be made unreliable.

    Args:
      level: 1 expressions of two calls, 2 (default) of two or three, 3 of two to five (difficulty differs).
      max_number: summands are drawn from 1 to this (9 to 99), factors from 2 to 9. Copying longer numbers is a skill
        of its own: with 20 a tiny model makes slips that learning from rewards repairs slowly.
      noise: share of demonstrations in which the plan goes wrong at one step: another operand, operator or order.
        Numbers are copied exactly all the same. 0 and `skip` 0 give an expert that solves everything.
      skip: share of demonstrations that answer with what is known before the last call.
      habit: share of the mistakes that are the expression's own, always the same one; the others are drawn anew.
        With 1 imitation learns the mistake as the likeliest plan, and greedy decoding does no better than sampling:
        what lifts success afterwards is learning from reward. With 0 the right plan stays the likeliest one, and
        greedy decoding solves nearly everything before any reward was seen.
    """

    name = "calculator"
    stop = ">]"
    tokenizer = CharTokenizer(ALPHABET)

    def __init__(self, level: int = 2, max_number: int = 9, noise: float = 0.55, skip: float = 0.2, habit: float = 1.0):
        if level not in LEVELS:
            raise ValueError(f"level is {level}; allowed: {', '.join(map(str, LEVELS))}")
        if not 9 <= max_number <= 99:
            raise ValueError(f"max_number is {max_number}; allowed: 9 to 99")
        for name, share in (("noise", noise), ("skip", skip), ("habit", habit)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; it is a share, from 0 to 1")
        self.templates = LEVELS[level]
        self.max_number, self.noise, self.skip, self.habit = max_number, noise, skip, habit
        self.max_tokens = {1: 48, 2: 64, 3: 112}[level]
        self.max_turns = 3 + max(len(plan) for plan in self.templates.values())

    def sample(self, rng: random.Random) -> Problem:
        template = rng.choice(list(self.templates))
        while True:
            numbers = [rng.randint(2, 9) if f else rng.randint(1, self.max_number) for f in factors(template)]
            # A result below zero would be a rare second skill to learn (signed operands), so there is none.
            if min(results(self.templates[template], numbers)) >= 0:
                return Problem(template, tuple(numbers))

    def prompt(self, problem: Problem) -> str:
        return substitute(problem.template, problem.numbers) + "?"

    def respond(self, problem: Problem, actions: Sequence[str]) -> Outcome:
        action = actions[-1]
        if action.endswith("]"):
            right = action == f"[{results(self.templates[problem.template], problem.numbers)[-1]}]"
            return Outcome(reward=float(right), end="terminated", reason="answer", parts={"answer": float(right)})
        return Outcome(observation=answer(action))

    def expert(self, problem: Problem, actions: Sequence[str], rng: random.Random) -> str:
        """The first call of the plan that has not been made yet, then the answer; from any state."""
        plan = list(self.templates[problem.template])
        wrong, skip = rng.random() < self.noise, rng.random() < self.skip
        if wrong:
            habitual = rng.random() < self.habit
            step, call = mistake(plan, problem.template, random.Random(problem.template) if habitual else rng)
            plan[step] = call
        if skip:
            plan.pop()
        return follow(plan, problem.numbers, actions)


def answer(call: str) -> str:
    """What the calculator says to a call, whatever it is."""
    match = _CALL.fullmatch(call)
    if match is None:
        return ERROR
    value = apply(int(match[1]), match[2], int(match[3]))
    return f"={value};" if abs(value) <= LIMIT else ERROR


def apply(left: int, operator: str, right: int) -> int:
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def operand(part: str, numbers: Sequence[int], values: Sequence[int]) -> int | str:
    """A letter is a number of the prompt, a digit an earlier result, an operator itself."""
    if part.isalpha():
        return numbers[ord(part) - ord("a")]
    return values[int(part)] if part.isdigit() else part


def results(plan: Sequence[str], numbers: Sequence[int]) -> list[int]:
    """The values of the calls of a plan, in order."""
    values: list[int] = []
    for left, operator, right in plan:
        values.append(apply(operand(left, numbers, values), operator, operand(right, numbers, values)))
    return values


def follow(plan: Sequence[str], numbers: Sequence[int], actions: Sequence[str]) -> str:
    """The first call of a plan that is not among the actions, then the answer with the last result that is known."""
    values = results(plan, numbers)
    known = numbers[0]
    for step, value in zip(plan, values, strict=True):
        call = f"<{substitute(step, numbers, values)}>"
        if call not in actions:
            return call
        if abs(value) > LIMIT:  # refused: there is no result to go on with
            break
        known = value
    return f"[{known}]"


def substitute(template: str, numbers: Sequence[int], values: Sequence[int] = ()) -> str:
    return "".join(str(operand(part, numbers, values)) for part in template)


def factors(template: str) -> list[bool]:
    """For each letter of a template, whether it stands next to a `*`."""
    padded = f" {template} "
    return ["*" in (padded[i - 1], padded[i + 1]) for i, character in enumerate(padded) if character.isalpha()]


def mistake(plan: Sequence[str], template: str, rng: random.Random) -> tuple[int, str]:
    """(step, call): a call that differs from the planned one in an operand, the operator or the order."""
    step = rng.randrange(len(plan))
    left, operator, right = plan[step]
    kind = rng.choice(["operand", "operator"] + (["order"] if operator == "-" else []))
    if kind == "order":
        return step, right + operator + left
    if kind == "operator":
        return step, left + rng.choice([o for o in "+-*" if o != operator]) + right
    available = [c for c in template if c.isalpha()] + [str(i) for i in range(step)]
    other = rng.choice([a for a in available if a not in (left, right)])
    return step, rng.choice([other + operator + right, left + operator + other])
