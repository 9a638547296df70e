"""Proofs, step by step: rewriting in arithmetic and propositional logic, from 4 steps to thousands.

    =+ss0s0sss0?la=l:s+s0dzsl:ss0q       kind=rewrite: 2 + 1 = 3 is proved by the steps `la`, `dz` and `q`
    prompt      action       action

    >&AB&BA?i1&AB:&BA11A2B:&BAs...       kind=prop: A and B implies B and A, proved by `i`, `1`, `s`, `x` and `x`
    prompt  action   action

Every step is checked by `kernel`, and only a proof that the kernel has accepted to its end is worth anything: 1. A step
that the kernel refuses is answered `!`; it costs a turn and changes nothing. What is shown stays short however large
the state is: of a term the symbols down to the third level around the focus, after the symbol above it and the side it
is on; of a stack of goals the first one with its hypotheses, formulas longer than 11 symbols by their upper levels and
`~`. In propositional proofs a step may lead to a goal that cannot be proved; `b` takes back the last step.
"""

import dataclasses
import functools
import random
from typing import Any

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.data.tokenizers import CharTokenizer
from sao_jax.envs import kernel
from sao_jax.envs.base import SteppedFamily
from sao_jax.envs.kernel import Invalid
from sao_jax.envs.proof_experts import (
    advise_prop,
    advise_rewrite,
    draw_equation,
    draw_proposition,
    equation_key,
    proposition_key,
)

ERROR = "!"
BACK = "b"
SHOWN = {"rewrite": 20, "prop": 11}  # longest term or formula that is shown whole
DEPTH = 3  # levels of a longer one that are shown
LEVELS = {1: (4, 7), 2: (8, 16), 3: (17, 40), 4: (41, 100), 5: (200, 400), 6: (800, 1200), 7: (2001, 2400)}
LONGEST = 5000


@dataclasses.dataclass(frozen=True, eq=False)
class Attempt:
    """proof: the kernel's state; done: landmarks reached (see `Logic`); before: the attempt as it was a step ago."""

    proof: Any
    turns: int = 0
    done: int = 0
    before: "Attempt | None" = None


@dataclasses.dataclass(frozen=True)
class Logic:
    """What differs between the two kinds.

    `landmark(before, after, action)`: whether the step counts as progress. A proof has as many as the expert's: in
    rewriting its applications of axioms, which no detour can repeat for ever; in propositions its closed goals.
    """

    alphabet: str
    stop: str
    start: Any
    step: Any
    is_proved: Any
    landmark: Any
    advise: Any
    draw: Any
    key: Any  # see `TaskFamily.split_key`
    confusion: tuple[str, str]  # (rule, what is taken for it)


class Proof(SteppedFamily):
    """Proofs of one kind, and demonstrations by an expert that can be made unreliable.

    Args:
      kind: "rewrite" or "prop".
      level: 1 to 7, proofs of 4-7, 8-16, 17-40, 41-100, 200-400, 800-1,200 and 2,001-2,400 steps by the expert; 0 draws
        a level from 1 to `top` for each instance, so that lengths are mixed.
      top: the highest level that level 0 draws.
      steps: proofs of about this many steps instead of a level: four fifths of it or more, at most as many. 4 to 5,000.
      noise: share of demonstrations by an expert with a confusion: it takes one rule for another (`a` where `z` is due,
        `x` where a hypothesis must be taken apart first) and insists on it until the turns are used up.
      habit: share of the confusions that are this one; the others confuse two rules drawn anew.
      slip: share of steps in all demonstrations that are drawn at random.

    An attempt may take a quarter more turns than the expert needs, and at least three. Held out are sums and theorems:
    not the same with the result written in another way, or with other letters. Of the 22 that propositions have at
    level 1 these are two.
    """

    name = "proof"

    def __init__(
        self,
        kind: str = "rewrite",
        level: int = 1,
        top: int = 3,
        steps: int = 0,
        noise: float = 0.6,
        habit: float = 1.0,
        slip: float = 0.02,
    ):
        if kind not in LOGICS:
            raise ValueError(f"kind is {kind!r}; allowed: {', '.join(LOGICS)}")
        if level not in (0, *LEVELS):
            raise ValueError(f"level is {level}; allowed: 1 to 7, or 0 for a mixture")
        if top not in LEVELS or (top != 3 and level != 0):
            raise ValueError(f"top is {top}; it needs level=0, and is 1 to 7")
        if steps and not 4 <= steps <= LONGEST:
            raise ValueError(f"steps is {steps}; allowed: 4 to {LONGEST}, or 0 to go by the level")
        if steps and level != 1:
            raise ValueError("level has no effect with steps; give one of them")
        for name, share in (("noise", noise), ("habit", habit), ("slip", slip)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; it is a share, from 0 to 1")
        self.kind, self.noise, self.habit, self.slip = kind, noise, habit, slip
        self.logic = LOGICS[kind]
        self.stop, self.tokenizer = self.logic.stop, CharTokenizer(self.logic.alphabet)
        self.lengths = (
            [(steps - steps // 5, steps)] if steps else [LEVELS[n] for n in range(level or 1, (level or top) + 1)]
        )
        longest = self.lengths[-1][1]
        # In rewriting up to every third turn of the expert only moves the focus.
        turns, tokens = (longest + longest // 2, 10) if kind == "rewrite" else (longest, 14)
        self.max_turns = limit(turns)
        self.max_tokens = 28 + tokens * turns + 3 * (self.max_turns - turns - 3)  # spare turns are mostly refused steps

    def sample(self, rng: random.Random) -> str:
        return self.logic.draw(rng.choice(self.lengths), rng)

    def split_key(self, problem: str) -> Any:
        return self.logic.key(problem)

    def prompt(self, problem: str) -> str:
        return shown(self.logic.start(problem), SHOWN[self.kind]) + "?"

    def begin(self, problem: str) -> Attempt:
        return Attempt(self.logic.start(problem))

    def advance(self, problem: str, state: Attempt, action: str) -> tuple[Attempt, Outcome]:
        turns, landmarks = measured(self.kind, problem)
        after = self._after(state, action)
        if after is None:
            after, observation, gained = dataclasses.replace(state, turns=state.turns + 1), ERROR, 0.0
        else:
            observation = view(after.proof)
            gained = min(1.0, after.done / landmarks) - min(1.0, state.done / landmarks)
        if self.logic.is_proved(after.proof):
            left = 1 - min(1.0, state.done / landmarks)
            return after, Outcome("", 1.0, "terminated", "proved", {"progress": left})
        ended = dict(end="terminated", reason=TURN_LIMIT) if after.turns >= limit(turns) else {}
        return after, Outcome(observation, parts={"progress": gained}, **ended)

    def advise(self, problem: str, state: Attempt, turn: int, rng: random.Random) -> str:
        confused, habitual = rng.random() < self.noise, rng.random() < self.habit
        due, taken = self.logic.confusion
        if not habitual:
            due, taken = rng.sample([r for r in self.stop if not r.isdigit()], 2)
        own = random.Random(f"{rng.random()}/{turn}")
        if own.random() < self.slip:
            return own.choice(self.stop)
        action = self.logic.advise(state.proof)
        if confused and (action[-1] == due or (due == "1" and action.isdigit())):
            return action[:-1] + taken
        return action

    def _after(self, state: Attempt, action: str) -> Attempt | None:
        """None for a step that is not valid."""
        if action == BACK:
            back = state.before if self.kind == "prop" else None
            return back and dataclasses.replace(back, turns=state.turns + 1)
        try:
            proof = self.logic.step(state.proof, action)
        except Invalid:
            return None
        done = state.done + self.logic.landmark(state.proof, proof, action)
        return Attempt(proof, state.turns + 1, done, state if self.kind == "prop" else None)


def limit(turns: int) -> int:
    """Turns that an attempt may take where the expert needs so many."""
    return turns + max(3, turns // 4)


@functools.lru_cache(1024)
def measured(kind: str, problem: str) -> tuple[int, int]:
    """(turns, landmarks) of the expert's proof."""
    logic, turns, landmarks = LOGICS[kind], 0, 0
    proof = logic.start(problem)
    while not logic.is_proved(proof):
        action = logic.advise(proof)
        after = logic.step(proof, action)
        turns, landmarks, proof = turns + 1, landmarks + logic.landmark(proof, after, action), after
    return turns, landmarks


def view(proof: Any) -> str:
    """What is shown of a kernel's state that is not proved yet."""
    if isinstance(proof, kernel.Rewriting):
        above = f"{proof.above[0][0]}{'lr'[proof.above[1] - 1]}:" if proof.above else ""
        return above + heads(proof.focus, DEPTH)
    if not proof:
        return ""
    hypotheses, goal = proof[0]
    listed = [f"{n}{cut(formula)}" for n, formula in enumerate(hypotheses[:9], 1)]
    return "".join(listed) + ":" + cut(goal)


def shown(proof: Any, longest: int) -> str:
    """A whole goal if it is short, else its upper levels."""
    return cut(proof.focus if isinstance(proof, kernel.Rewriting) else proof[0][1], longest)


def cut(term: kernel.Term, longest: int = SHOWN["prop"]) -> str:
    text = written(term, longest + 1)
    return text if len(text) <= longest else heads(term, DEPTH) + "~"


def written(term: kernel.Term, most: int) -> str:
    """The first `most` symbols of a term."""
    symbols, left = [], [term]
    while left and len(symbols) < most:
        node = left.pop()
        symbols.append(node[0])
        left.extend(reversed(node[1:]))
    return "".join(symbols)


def heads(term: kernel.Term, depth: int) -> str:
    """The symbols of the upper levels of a term."""
    return term[0] + "".join(heads(argument, depth - 1) for argument in term[1:]) if depth else ""


LOGICS = {
    "rewrite": Logic(
        alphabet="0s+*=" + "lrudt" + "zaomcq." + "!?:~",
        stop=kernel.REWRITES,
        start=kernel.equation,
        step=kernel.rewrite,
        is_proved=lambda proof: proof.proved,
        landmark=lambda before, after, action: action[-1] in "zaomq",
        advise=advise_rewrite,
        draw=draw_equation,
        key=equation_key,
        confusion=("z", "a"),
    ),
    "prop": Logic(
        alphabet="ABCDEF0&|>" + kernel.RULES + BACK + "!?:~",
        stop=kernel.RULES + BACK,
        start=kernel.proposition,
        step=kernel.prove,
        is_proved=lambda proof: not proof,
        landmark=lambda before, after, action: len(after) < len(before),
        advise=advise_prop,
        draw=draw_proposition,
        key=proposition_key,
        confusion=("1", "x"),
    ),
}
