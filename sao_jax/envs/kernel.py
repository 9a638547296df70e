"""The trusted kernel of the proof task: it alone decides whether a step is valid and when a proof is complete.

Two logics, each a function from a state and one step to the next state; it raises `Invalid` for all that is no valid
step. States are values and never change. Terms and formulas are written in prefix form.

**Rewriting.** Terms are `0`, `st` (successor), `+tu` and `*tu`, the goal is an equation `=tu`. A state is a term with a
focus. A step is a path from the focus, then one rule that is applied where the path ends:

    path   l, r   to the first, the second argument       z   +x0  -> x         o   *x0  -> 0
           u      to the term around the focus            a   +xsy -> s+xy      m   *xsy -> +*xyx
           d      down all successors                     c   +xy  -> +yx, *xy -> *yx
           t      to the equation                         q   closes the goal =tt; no path before it
                                                          .   only moves the focus

z, a, o and m are axioms of arithmetic, c is a theorem of them. Each rewrites a term to an equal one, so a goal that q
closes is a theorem.

**Propositions.** Formulas: atoms `A` to `F`, `0` (false), `&pq`, `|pq`, `>pq` (p implies q). A state is a stack of
goals, each with hypotheses (the newest first); a step works on the first one, by a rule of intuitionistic sequents:

    i   H, p |- q  proves  H |- >pq          s   H |- p and H |- q  prove  H |- &pq
    l   H |- p     proves  H |- |pq          r   H |- q             proves  H |- |pq
    x   H |- p     holds if p or 0 is in H
    1 to 9 take the n-th hypothesis h out of H (goal g, the rest of the hypotheses R):
        &pq   p, q, R |- g                   |pq   p, R |- g and q, R |- g
        >pq   H |- p and q, R |- g           0     nothing is left to prove
"""

import dataclasses
from typing import Any

SYMBOLS = {"0": 0, "s": 1, "+": 2, "*": 2, "=": 2}
CONNECTIVES = {"0": 0, "&": 2, "|": 2, ">": 2} | dict.fromkeys("ABCDEF", 0)
PATHS, REWRITES, RULES = "lrudt", "zaomcq.", "islrx123456789"
_LONGEST_PATH = 8

Term = tuple[Any, ...]  # (symbol, *arguments)
ZERO: Term = ("0",)


class Invalid(ValueError):
    """The step is not valid in this state."""


def parse(text: str, arities: dict[str, int]) -> Term:
    """The term that a prefix text writes. Raises ValueError if it writes none, or more than one."""
    stack: list[Term] = []
    for symbol in reversed(text):
        arity = arities.get(symbol)
        if arity is None or arity > len(stack):
            raise ValueError(f"{text[:40]!r} is no term over {''.join(arities)}")
        arguments = [stack.pop() for _ in range(arity)]
        stack.append((symbol, *arguments))
    if len(stack) != 1:
        raise ValueError(f"{text[:40]!r} writes {len(stack)} terms; it should write one")
    return stack[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Rewriting:
    """`above`: None at the equation, else (the term around the focus, index of the focus in it, what is above)."""

    focus: Term
    above: tuple[Term, int, Any] | None = None
    proved: bool = False


def equation(text: str) -> Rewriting:
    """The goal that a text `=tu` writes. Raises ValueError if it writes none."""
    term = parse(text, SYMBOLS)
    if term[0] != "=" or "=" in text[1:]:
        raise ValueError(f"{text[:40]!r} is no equation of two terms")
    return Rewriting(term)


def rewrite(state: Rewriting, step: str) -> Rewriting:
    """The state after a step. Raises Invalid."""
    path, rule = step[:-1], step[-1:]
    if state.proved or not rule or rule not in REWRITES or len(path) > _LONGEST_PATH:
        raise Invalid(step)
    if rule == "q":
        root = _top(state)
        if path or not _equal(root.focus[1], root.focus[2]):
            raise Invalid(step)
        return dataclasses.replace(root, proved=True)
    for direction in path:
        state = _moved(state, direction)
    return state if rule == "." else dataclasses.replace(state, focus=_rewritten(state.focus, rule))


def _moved(state: Rewriting, direction: str) -> Rewriting:
    match direction, state.focus:
        case ("t", _):
            return _top(state)
        case ("u", _) if state.above is not None:
            return _up(state)
        case ("l", (_, _, *_)):
            return _down(state, 1)
        case ("r", (_, _, _)):
            return _down(state, 2)
        case ("d", ("s", _)):
            while state.focus[0] == "s":
                state = _down(state, 1)
            return state
    raise Invalid(direction)


def _down(state: Rewriting, index: int) -> Rewriting:
    return Rewriting(state.focus[index], (state.focus, index, state.above))


def _up(state: Rewriting) -> Rewriting:
    around, index, above = state.above
    return Rewriting((*around[:index], state.focus, *around[index + 1 :]), above)


def _top(state: Rewriting) -> Rewriting:
    while state.above is not None:
        state = _up(state)
    return state


def _rewritten(term: Term, rule: str) -> Term:
    match rule, term:
        case ("z", ("+", x, ("0",))):
            return x
        case ("a", ("+", x, ("s", y))):
            return ("s", ("+", x, y))
        case ("o", ("*", _, ("0",))):
            return ZERO
        case ("m", ("*", x, ("s", y))):
            return ("+", ("*", x, y), x)
        case ("c", ("+" | "*" as symbol, x, y)):
            return (symbol, y, x)
    raise Invalid(rule)


def _equal(one: Term, other: Term) -> bool:
    """Without recursion: numerals are thousands of successors deep."""
    pairs = [(one, other)]
    while pairs:
        a, b = pairs.pop()
        if a is b:
            continue
        if a[0] != b[0]:
            return False
        pairs.extend(zip(a[1:], b[1:], strict=True))
    return True


Sequent = tuple[tuple[Term, ...], Term]  # hypotheses, the newest first; goal
Goals = tuple[Sequent, ...]  # empty: proved


def proposition(text: str) -> Goals:
    """The goal that a formula writes. Raises ValueError if it writes none."""
    return (((), parse(text, CONNECTIVES)),)


def prove(goals: Goals, step: str) -> Goals:
    """The goals after a step. Raises Invalid."""
    if not goals or len(step) != 1 or step not in RULES:
        raise Invalid(step)
    (hypotheses, goal), *rest = goals
    return (*_premises(hypotheses, goal, step), *rest)


def _premises(hypotheses: tuple[Term, ...], goal: Term, step: str) -> Goals:
    """The goals from which a step proves a goal."""
    if step in "123456789":
        return _eliminated(hypotheses, goal, int(step) - 1)
    match step, goal:
        case ("i", (">", p, q)):
            return (((p, *hypotheses), q),)
        case ("s", ("&", p, q)):
            return ((hypotheses, p), (hypotheses, q))
        case ("l", ("|", p, _)):
            return ((hypotheses, p),)
        case ("r", ("|", _, q)):
            return ((hypotheses, q),)
        case ("x", _) if goal in hypotheses or ZERO in hypotheses:
            return ()
    raise Invalid(step)


def _eliminated(hypotheses: tuple[Term, ...], goal: Term, index: int) -> Goals:
    if index >= len(hypotheses):
        raise Invalid(str(index + 1))
    rest = (*hypotheses[:index], *hypotheses[index + 1 :])
    match hypotheses[index]:
        case ("&", p, q):
            return (((p, q, *rest), goal),)
        case ("|", p, q):
            return (((p, *rest), goal), ((q, *rest), goal))
        case (">", p, q):
            return ((hypotheses, p), ((q, *rest), goal))
        case ("0",):
            return ()
    raise Invalid(str(index + 1))
