"""Single-turn puzzles with one right answer, small enough for a tiny model.

    52817?12578;        kind=sort
    prompt answer

One action ends the attempt. The reward is 1 for the exact answer; with `partial`, the share of its characters that
are right where they stand, which gives a model that knows nothing yet something to climb.
"""

import random
from collections.abc import Sequence

from sao_jax.data.protocols import Outcome
from sao_jax.data.tokenizers import CharTokenizer
from sao_jax.envs.base import TaskFamily

ALPHABET = "0123456789+?;"


class Arithmetic(TaskFamily):
    """Puzzles of one kind.

    Args:
      kind: "sort" the digits, "reverse" them, the "max" digit, or "add" two numbers of that many digits.
      digits: of the number in the prompt, 2 to 8.
      partial: reward the share of right characters instead of all or nothing.
      noise: share of demonstrations that answer with one wrong digit.
    """

    name = "arithmetic"
    stop = ";"
    max_turns = 1
    tokenizer = CharTokenizer(ALPHABET)

    def __init__(self, kind: str = "sort", digits: int = 4, partial: bool = False, noise: float = 0.0):
        if kind not in _SOLVERS:
            raise ValueError(f"kind is {kind!r}; allowed: {', '.join(_SOLVERS)}")
        if not 2 <= digits <= 8:
            raise ValueError(f"digits is {digits}; allowed: 2 to 8")
        if not 0 <= noise <= 1:
            raise ValueError(f"noise is {noise}; it is a share, from 0 to 1")
        self.kind, self.digits, self.partial, self.noise = kind, digits, partial, noise
        # Longest: two summands, "+" and "?", a sum with one more digit and ";".
        self.max_tokens = 3 * digits + 4

    def sample(self, rng: random.Random) -> str:
        count = 2 if self.kind == "add" else 1
        return "+".join("".join(rng.choices("0123456789", k=self.digits)) for _ in range(count))

    def prompt(self, problem: str) -> str:
        return problem + "?"

    def respond(self, problem: str, actions: Sequence[str]) -> Outcome:
        right = _SOLVERS[self.kind](problem) + ";"
        exact = float(actions[-1] == right)
        matches = sum(a == b for a, b in zip(actions[-1], right, strict=False))
        share = matches / max(len(actions[-1]), len(right))
        reward = share if self.partial else exact
        return Outcome(reward=reward, end="terminated", reason="answer", parts={"exact": exact, "share": share})

    def expert(self, problem: str, actions: Sequence[str], rng: random.Random) -> str:
        text = _SOLVERS[self.kind](problem)
        if rng.random() < self.noise:
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice([d for d in "0123456789" if d != text[at]]) + text[at + 1 :]
        return text + ";"


_SOLVERS = {
    "sort": lambda problem: "".join(sorted(problem)),
    "reverse": lambda problem: problem[::-1],
    "max": max,
    "add": lambda problem: str(sum(int(number) for number in problem.split("+"))),
}
