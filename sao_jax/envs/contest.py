"""Program synthesis: find the program behind the examples, try it on them, and submit it.

    0>7 100>307?  ?2*x+7;  =7,207;  ?3*x+7;  =7,307;  !3*x+7;
    prompt        action   obs      action   obs      action

`?program;` shows what a program gives for the inputs of the prompt, `!` where that is no integer of at most six digits
or nothing. `!program;` submits it and ends the attempt; it is worth 1 if its outputs are right on these inputs and on
others, which are never shown, and 0 otherwise. A program that takes too long, for any input, gives nothing.

A program is an expression in x (and y, from level 2 on), or statements on several lines that leave the result in s. It
is whatever Python takes it to be: nothing is parsed here, every program runs in the sandbox.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Sequence

from sao_jax.data.protocols import Outcome
from sao_jax.data.tokenizers import CharTokenizer
from sao_jax.envs.base import TaskFamily
from sao_jax.envs.sandbox import Limits, Result, Sandbox
from sao_jax.envs.verifiers import verdicts

ALPHABET = "0123456789+-*%()=,>?!; \nxysiforangel:"
LIMIT = 999_999  # largest magnitude of a value shown
ERROR = "=!;"


@dataclasses.dataclass(frozen=True)
class Form:
    """A program with holes for its constants.

    Attributes:
      ranges: first and last value of each of a, b, c that it has.
      mistake: what a careless author writes for it.
    """

    program: str
    ranges: tuple[tuple[int, int], ...]
    mistake: str


@dataclasses.dataclass(frozen=True)
class Level:
    """Programs that are shown on the same inputs and judged on the same others. No two agree on those shown."""

    forms: tuple[Form, ...]
    shown: tuple[tuple[int, ...], ...]
    hidden: tuple[tuple[int, ...], ...]
    max_tokens: int


# At 100 a polynomial with small coefficients shows them as digits, so reading them off comes before arithmetic; and
# there are too many programs to be learned by heart.
LEVELS = {
    1: Level(
        forms=(
            Form("a*x+b", ((2, 99), (1, 99)), "a*x*x+b"),
            Form("a*x*x+b", ((2, 99), (1, 99)), "a*x+b"),
            Form("x*x+a*x+b", ((2, 99), (1, 99)), "x*x*a+b"),
        ),
        shown=((0,), (100,)),
        hidden=((1,), (2,), (7,), (12,), (-1,), (-6,)),
        max_tokens=80,
    ),
    2: Level(
        forms=(
            Form("a*x+b*y+c", ((2, 20), (2, 20), (1, 20)), "a*x-b*y+c"),
            Form("a*x+c if x>y else b*y+c", ((2, 20), (2, 20), (1, 20)), "a*x+c if x>y else b*x+c"),
            Form("x*y+a*x+b", ((2, 99), (1, 99)), "x*y+a*y+b"),
        ),
        shown=((0, 0), (100, 0), (0, 100), (100, 100)),
        hidden=((2, 3), (5, 1), (1, 6), (4, 4), (9, 2), (-2, 3), (7, -5)),
        max_tokens=192,
    ),
    3: Level(
        forms=(
            Form("s=b\nfor i in range(x):s+=a*i", ((2, 60), (1, 60)), "s=b\nfor i in range(x):s+=a"),
            Form("s=b\nfor i in range(x):s+=i*i+a", ((0, 60), (1, 60)), "s=b\nfor i in range(x):s+=i+a"),
            Form("s=b\nfor i in range(x):s=2*s-a", ((1, 60), (61, 99)), "s=b\nfor i in range(x):s=2*s+a"),
            Form("s=b\nfor i in range(x):s=a-s", ((61, 99), (1, 60)), "s=b\nfor i in range(x):s=a+s"),
        ),
        shown=((0,), (1,), (2,), (3,), (4,)),
        hidden=((5,), (6,), (7,), (9,)),
        max_tokens=176,
    ),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """The `form`-th program of a level, with its constants."""

    level: int
    form: int
    constants: tuple[int, ...]


class Contest(TaskFamily):
    """Programs to find, and demonstrations by an author who is careless now and then.

    Args:
      level: 1 (default) polynomials in x, 2 expressions in x and y with conditions, 3 loops; 0 draws the level of each
        instance.
      noise: share of demonstrations whose first program is wrong.
      skip: share of demonstrations that submit their first program untried. The others try it, and submit the right
        one after what they have seen. So 1 - noise * skip of all demonstrations are right.
      habit: share of the wrong programs that are their form's own, always the same one; in the others one constant is
        wrong. See `Calculator`.
    """

    name = "contest"
    stop = ";"
    max_turns = 4
    fast = False  # a program takes milliseconds, and a bad one as long as it is let
    tokenizer = CharTokenizer(ALPHABET)

    def __init__(self, level: int = 1, noise: float = 0.75, skip: float = 0.75, habit: float = 1.0):
        if level != 0 and level not in LEVELS:
            raise ValueError(f"level is {level}; allowed: {', '.join(map(str, LEVELS))}, or 0 for all of them")
        for name, share in (("noise", noise), ("skip", skip), ("habit", habit)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; it is a share, from 0 to 1")
        self.levels = [level] if level else list(LEVELS)
        self.noise, self.skip, self.habit = noise, skip, habit
        self.max_tokens = max(LEVELS[n].max_tokens for n in self.levels)

    def sample(self, rng: random.Random) -> Problem:
        level = rng.choice(self.levels)
        form = rng.randrange(len(LEVELS[level].forms))
        return Problem(level, form, tuple(rng.randint(*r) for r in LEVELS[level].forms[form].ranges))

    def prompt(self, problem: Problem) -> str:
        shown = zip(LEVELS[problem.level].shown, _expected(problem), strict=False)
        return " ".join(f"{','.join(map(str, inputs))}>{output}" for inputs, output in shown) + "?"

    def respond(self, problem: Problem, actions: Sequence[str]) -> Outcome:
        action, expected, level = actions[-1], _expected(problem), LEVELS[problem.level]
        kind, program, end = action[:1], action[1:-1], action[-1:]
        if len(action) < 2 or kind not in "?!" or end != ";":
            return Outcome(observation=ERROR)
        result = _run(program, problem.level)
        if kind == "?":
            values = list(result.values) or [None] * len(expected)
            return Outcome(observation=f"={','.join(map(_show, values[: len(level.shown)]))};")
        right = verdicts(result, expected)
        solved, hidden = float(all(right)), right[len(level.shown) :]
        parts = {"solved": solved, "hidden_share": sum(hidden) / len(hidden)}
        return Outcome(reward=solved, end="terminated", reason="submitted", parts=parts)

    def expert(self, problem: Problem, actions: Sequence[str], rng: random.Random) -> str:
        """Tries the first program, unless that is skipped, then submits; from any state."""
        wrong, skip = rng.random() < self.noise, rng.random() < self.skip
        right = reference(problem)
        first = mistake(problem, rng.random() < self.habit, rng) if wrong else right
        if skip:
            return f"!{first};"
        trial = f"?{first};"
        return f"!{right};" if trial in actions else trial


def reference(problem: Problem) -> str:
    """The program that the problem was made from."""
    return _fill(LEVELS[problem.level].forms[problem.form].program, problem.constants)


def mistake(problem: Problem, habitual: bool, rng: random.Random) -> str:
    """A wrong program: the form's own, or the right one but for a constant."""
    form = LEVELS[problem.level].forms[problem.form]
    if habitual:
        return _fill(form.mistake, problem.constants)
    constants = list(problem.constants)
    at = rng.randrange(len(constants))
    first, last = form.ranges[at]
    constants[at] = rng.choice([value for value in range(first, last + 1) if value != constants[at]])
    return _fill(form.program, constants)


def outputs_of(program: str, inputs: Sequence[tuple[int, ...]]) -> list:
    """What one of our own programs gives, run here."""
    namespace = {}
    exec(_source(program, len(inputs[0])), namespace)
    return [namespace["solve"](*arguments) for arguments in inputs]


@functools.lru_cache(maxsize=4096)
def _expected(problem: Problem) -> list[int]:
    """Right outputs on the inputs shown, then on the hidden ones."""
    level = LEVELS[problem.level]
    return outputs_of(reference(problem), level.shown + level.hidden)


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox(Limits(cpu_s=0.2, wall_s=10.0, memory_mb=256, output_bytes=4096))


def _run(program: str, level: int) -> Result:
    """A policy's program on all inputs of a level. What was tried is submitted next, and is not run again."""
    result = _run_once(program, level)
    if result.status in ("time", "crash"):  # may be the machine's doing: not to be remembered
        _run_once.cache_clear()
    return result


@functools.lru_cache(maxsize=16_384)
def _run_once(program: str, level: int) -> Result:
    inputs = LEVELS[level].shown + LEVELS[level].hidden
    return _sandbox().run(_source(program, len(inputs[0])), inputs)


def _source(program: str, inputs: int) -> str:
    head = f"def solve({'x, y'[: 3 * inputs - 2]}):\n"
    if "\n" not in program:
        return f"{head} return {program}"
    return head + "".join(f" {line}\n" for line in program.split("\n")) + " return s"


def _show(value) -> str:
    return str(value) if type(value) is int and abs(value) <= LIMIT else "!"


def _fill(text: str, constants: Sequence[int]) -> str:
    names = dict(zip("abc", constants, strict=False))
    return re.sub(r"\b[abc]\b", lambda match: str(names[match[0]]), text)
