"""Provers and problems of the proof task; nothing here is trusted: the kernel checks what they do."""

import functools
import random

from sao_jax.envs import kernel
from sao_jax.envs.kernel import SYMBOLS, ZERO, Rewriting, Sequent, Term, parse

VISIBLE = 2  # levels below the focus that a view shows

# -- rewriting ---------------------------------------------------------------------------------------------------------


def advise_rewrite(state: Rewriting) -> str:
    """The next step of a proof that computes both sides, outermost sum or product first; from any state.

    It relies on no more than a view shows: where it cannot see the rule to apply, it only moves (`.`).
    """
    focus, above = state.focus, state.above
    if focus[0] in "+*":
        return _towards(*redex(focus))
    if above is None:
        for path, side in (("l", focus[1]), ("r", focus[2])):
            found = _below(side)
            if found:
                return _towards(path + found[0], found[1])
        return "q"
    around, index, _ = above
    if around[0] in "+*" and index == 2:  # what the term around it waited for
        return "u" + _rule(around[0], focus)
    found = _below(focus) if around[0] in "s=" else None
    if found:
        return _towards(*found)
    return _from_a_numeral(state)


def redex(term: Term) -> tuple[str, str]:
    """(path, rule) of the next step in a sum or product: where its second argument begins with a successor or 0."""
    path = ""
    while term[2][0] in "+*":
        path, term = path + "r", term[2]
    return path, _rule(term[0], term[2])


def _rule(symbol: str, second: Term) -> str:
    return {"+": "az", "*": "mo"}[symbol][second[0] == "0"]


def _below(term: Term) -> tuple[str, str] | None:
    """(path, rule) below the successors at the top of a term; None if it is a numeral."""
    deep = 0
    while term[0] == "s":
        deep, term = deep + 1, term[1]
    if term[0] == "0":
        return None
    path, rule = redex(term)
    return "d" * (deep > 0) + path, "." if deep > 1 else rule


def _from_a_numeral(state: Rewriting) -> str:
    """Goes to the side of the equation that is not a numeral yet; to the top where that is not clear from here."""
    while state.above is not None and state.above[0][0] == "s":
        state = Rewriting(state.above[0], state.above[2])
    if state.above is None or state.above[0][0] != "=":
        return "t."
    equation, index, _ = state.above
    if _below(equation[3 - index]):
        return "tr." if index == 1 else "tl."
    return "q"


def _towards(path: str, rule: str) -> str:
    """The step, if its redex can be seen from here; else a move towards it."""
    return path + rule if len(path) < VISIBLE else path[:VISIBLE] + "."


SUMS = ("+NN", "+N+NN", "++NNN")
PRODUCTS = ("*NN", "+*NNN", "+N*NN", "*+NNN", "*N+NN", "+*NN*NN")


def draw_equation(lengths: tuple[int, int], rng: random.Random) -> str:
    """A true equation that the expert proves in a number of steps within these bounds, both included."""
    low, high = lengths
    while True:
        shape = rng.choice(SUMS + PRODUCTS if high <= 100 else PRODUCTS)
        most = min(high, 40) if shape in SUMS else 1 + int(1.5 * high**0.5)
        left = "".join(_numeral(rng.randint(0, most)) if c == "N" else c for c in shape)
        value, steps = computed(parse(left, SYMBOLS))
        right = _numeral(value)
        if high > 16 and rng.random() < 0.4:
            part = rng.randint(0, min(value, high // 4))
            right = f"+{_numeral(value - part)}{_numeral(part)}"
            steps += part + 1
        if low <= steps + 1 <= high:
            return f"={left}{right}"


def equation_key(problem: str) -> str:
    """What is computed, whatever the form of the result on the right: a numeral there."""
    left = _first(problem[1:], SYMBOLS)
    return f"={left}{_numeral(computed(parse(left, SYMBOLS))[0])}"


def _first(text: str, arities: dict[str, int]) -> str:
    """The first term of a text of terms."""
    missing = 1
    for end, symbol in enumerate(text, 1):
        missing += arities[symbol] - 1
        if missing == 0:
            return text[:end]
    raise ValueError(f"{text[:40]!r} begins with no term")


def _numeral(number: int) -> str:
    return "s" * number + "0"


def computed(term: Term) -> tuple[int, int]:
    """(value, steps that the expert takes to a numeral) of a term whose successors are in numerals only."""
    if term[0] in "s0":
        return numeral_value(term), 0
    (x, x_steps), (y, y_steps) = computed(term[1]), computed(term[2])
    if term[0] == "+":
        return x + y, x_steps + y_steps + y + 1
    return x * y, y_steps + y * (1 + x_steps + x + 1) + 1  # x is computed anew for each successor of y


def numeral_value(term: Term) -> int:
    """Number of successors around the zero. Raises ValueError for a term that is no numeral."""
    value = 0
    while term[0] == "s":
        value, term = value + 1, term[1]
    if term != ZERO:
        raise ValueError("no numeral")
    return value


# -- propositions ------------------------------------------------------------------------------------------------------

TEMPLATES = (
    *(">p>qp", ">&pqp", ">&pqq", ">p|pq", ">q|pq", ">p&pp", ">&pq&qp", ">|pq|qp", ">&p>pqq", ">p>q&pq", ">p>>p00"),
    *(">&p>p0q", ">>pq>>qr>pr", ">&>pq>qr>pr", ">>pq>>q0>p0", ">&>pr>qr>|pqr", ">>&pqr>p>qr", ">>p>qr>&pqr"),
    *(">&&pqr&p&qr", ">||pqr|p|qr", ">&p|qr|&pq&pr", ">|&pq&pr&p|qr", ">>p&qr&>pq>pr", ">>|pqr&>pr>qr"),
)


def advise_prop(goals: kernel.Goals) -> str:
    """The next step of a proof of the first goal; `b` where it has none."""
    hypotheses, goal = goals[0]
    if goal[0] == "&" and not hypotheses:  # a conjunction of problems
        return "s"
    proof = solution(goals[0])
    return proof[0] if proof else "b"


@functools.lru_cache(1 << 16)
def solution(sequent: Sequent) -> tuple[str, ...] | None:
    """Steps that prove a goal; None if there are none."""
    return _search(sequent, frozenset())


def _search(sequent: Sequent, path: frozenset) -> tuple[str, ...] | None:
    """Depth first. A goal that occurs below itself is given up; a step that loses nothing has no alternative."""
    hypotheses, goal = sequent
    seen = (frozenset(hypotheses), goal)
    if seen in path:
        return None
    for step, final in _candidates(hypotheses, goal):
        proofs = []
        for premise in kernel.prove((sequent,), step):
            proof = _search(premise, path | {seen})
            if proof is None:
                break
            proofs.append(proof)
        else:
            return (step, *(s for proof in proofs for s in proof))
        if final:
            return None
    return None


def _candidates(hypotheses: tuple[Term, ...], goal: Term):
    """(step, whether the goal can be proved at all only if it can be after it), the most promising first."""
    if goal in hypotheses or ZERO in hypotheses:
        yield "x", True
    if goal[0] in ">&":
        yield {">": "i", "&": "s"}[goal[0]], True
    addressed = list(enumerate(hypotheses[:9], 1))
    for n, hypothesis in addressed:
        if hypothesis[0] in "&|" or (hypothesis[0] == ">" and hypothesis[1] in hypotheses):
            yield str(n), True
    if goal[0] == "|":
        yield from (("l", False), ("r", False))
    yield from ((str(n), False) for n, hypothesis in addressed if hypothesis[0] == ">")


def draw_proposition(lengths: tuple[int, int], rng: random.Random) -> str:
    """A conjunction of theorems, or one, that the expert proves in a number of steps within these bounds."""
    low, high = lengths
    wanted = rng.randint(low, high)
    theorems, steps = [], -1  # n theorems need n - 1 splits
    while steps < wanted:
        theorem = _instance(rng, compound=high > 16)
        longer = steps + 1 + len(solution(kernel.proposition(theorem)[0]))
        if longer <= high:
            theorems.append(theorem)
            steps = longer
        elif high - steps < 4:  # nothing fits any more
            if steps >= low:
                break
            theorems, steps = [], -1
    return _conjunction(theorems, rng)


def proposition_key(problem: str) -> tuple[str, ...]:
    """The theorems of a conjunction, in no order and whatever their letters: the proof of each is the same."""
    if problem[0] == "&":
        left = _first(problem[1:], kernel.CONNECTIVES)
        return tuple(sorted(proposition_key(left) + proposition_key(problem[1 + len(left) :])))
    letters = {c: chr(ord("A") + n) for n, c in enumerate(dict.fromkeys(c for c in problem if c.isalpha()))}
    return (problem.translate(str.maketrans(letters)),)


def _instance(rng: random.Random, compound: bool) -> str:
    p, q, r = rng.sample("ABCDEF", 3)
    if compound and rng.random() < 0.25:
        p = rng.choice("&|>") + "".join(rng.sample("ABCDEF", 2))
    return rng.choice(TEMPLATES).translate(str.maketrans(dict(p=p, q=q, r=r)))


def _conjunction(theorems: list[str], rng: random.Random) -> str:
    if len(theorems) == 1:
        return theorems[0]
    middle = len(theorems) // 2
    middle += rng.randint(-(middle // 2), middle // 2)
    middle = min(max(middle, 1), len(theorems) - 1)
    return "&" + _conjunction(theorems[:middle], rng) + _conjunction(theorems[middle:], rng)
