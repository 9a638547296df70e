import contextlib
import itertools
import random

import hypothesis
import hypothesis.strategies as st
import pytest

from sao_jax.envs import kernel
from sao_jax.envs.kernel import (
    CONNECTIVES,
    PATHS,
    REWRITES,
    RULES,
    SYMBOLS,
    Invalid,
    equation,
    parse,
    proposition,
    prove,
    rewrite,
)


def text(term) -> str:
    """Prefix form, without recursion."""
    symbols, left = [], [term]
    while left:
        node = left.pop()
        symbols.append(node[0])
        left.extend(reversed(node[1:]))
    return "".join(symbols)


def after(goal: str, *steps: str) -> str:
    """The equation after these steps, and `proved`."""
    state = equation(goal)
    for step in steps:
        state = rewrite(state, step)
    return text(rewrite(state, "t.").focus) if not state.proved else "proved"


def sequents(goals) -> list[str]:
    return [",".join(map(text, hypotheses)) + "|-" + text(goal) for hypotheses, goal in goals]


# -- rewriting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "step", "result"),
    [
        ("=+ss00ss0", "lz", "=ss0ss0"),
        ("=+0s00", "la", "=s+000"),
        ("=*s000", "lo", "=00"),
        ("=*s0ss00", "lm", "=+*s0s0s00"),
        ("=+s000", "lc", "=+0s00"),
        ("=*s000", "lc", "=*0s00"),
        ("=0+00", "rz", "=00"),
        ("=ss+000", "lllz", "=ss00"),
        ("=ss+000", "ldz", "=ss00"),
        ("=+0+000", "lrz", "=+000"),
        ("=+0+000", "lruc", "=++0000"),
        ("=0+00", "lutrz", "=00"),
        ("=0+00", "l.", "=0+00"),
        ("=0+00", "tttttttt.", "=0+00"),
    ],
)
def test_a_rule_rewrites_the_term_at_the_end_of_its_path(goal, step, result):
    assert after(goal, step) == result


@pytest.mark.parametrize(
    ("goal", "step"),
    [
        *(("=+0s00", step) for step in ("lz", "lo", "lm", "z", "a", "c", "ra", "da", "lda", "ua", "lla", "q")),
        *(("=*0s00", step) for step in ("lz", "la", "lo", "rm", "lrm", "lrc")),
        *(("=*000", step) for step in ("lm", "lz")),
        *(
            ("=00", step)
            for step in ("", "l", "x", "lq", "tq", "qq", "Q", "q.", "lrz", " q", "t" * 9 + ".", "rr.", "é")
        ),
        ("=s00", "lrz"),
        ("=s00", "ldd."),
        ("=+s0s00", "lz"),
    ],
)
def test_what_is_no_valid_rewriting_is_refused(goal, step):
    with pytest.raises(Invalid):
        rewrite(equation(goal), step)


def test_an_equation_is_proved_by_its_sides_being_the_same_only():
    assert after("=+s0s0ss0", "la", "dz", "q") == "proved"
    with pytest.raises(Invalid):
        after("=+s0s0ss0", "la", "q")
    with pytest.raises(Invalid):
        after("=s00", "q")
    with pytest.raises(Invalid, match="q"):
        after("=00", "q", "q")
    # Commutativity makes the sides the same without computing them.
    assert after("=+s0ss0+ss0s0", "lc", "q") == "proved"


def test_numerals_may_be_thousands_deep():
    number = "s" * 5000 + "0"
    assert after(f"=+{number}0{number}", "lz", "q") == "proved"
    with pytest.raises(Invalid):
        after(f"=+{number}0s{number}", "lz", "q")
    assert after(f"=0{number[:-1]}+00", "rdz") == f"=0{number}"


@pytest.mark.parametrize("bad", ["", "=", "=0", "=00s", "0", "s0", "==000", "=0=00", "=0x", "=000", "=+00"])
def test_what_is_no_equation_is_refused(bad):
    with pytest.raises(ValueError, match=r"term|equation"):
        equation(bad)


def value(term):
    match term:
        case ("0",):
            return 0
        case ("s", x):
            return value(x) + 1
        case ("+", x, y):
            return value(x) + value(y)
        case ("*", x, y):
            return value(x) * value(y)
        case ("=", x, y):
            return value(x), value(y)


def random_term(rng, depth):
    symbol = rng.choice("0s+*") if depth else "0"
    return symbol + "".join(random_term(rng, depth - 1) for _ in range(SYMBOLS[symbol]))


@hypothesis.given(st.randoms(use_true_random=False))
@hypothesis.settings(max_examples=200, deadline=None)
def test_no_step_changes_a_value_and_no_false_equation_is_proved(rng):
    state = equation("=" + random_term(rng, 3) + random_term(rng, 3))
    values = value(state.focus)
    for _ in range(40):
        step = "".join(rng.choices(PATHS, k=rng.randint(0, 3))) + rng.choice(REWRITES)
        try:
            state = rewrite(state, step)
        except Invalid:
            continue
        if state.proved:
            assert values[0] == values[1]
            break
        assert value(rewrite(state, "t.").focus) == values


# -- propositions ------------------------------------------------------------------------------------------------------


def goals_of(*sequents_: str):
    """`A,&BC|-D`, ..."""
    split = [s.split("|-") for s in sequents_]
    return tuple(
        (tuple(parse(h, CONNECTIVES) for h in left.split(",") if h), parse(right, CONNECTIVES)) for left, right in split
    )


@pytest.mark.parametrize(
    ("sequent", "step", "premises"),
    [
        ("C|->AB", "i", ["A,C|-B"]),
        ("C|-&AB", "s", ["C|-A", "C|-B"]),
        ("C|-|AB", "l", ["C|-A"]),
        ("C|-|AB", "r", ["C|-B"]),
        ("B,A|-A", "x", []),
        ("B,>AB|->AB", "x", []),
        ("B,0|-A", "x", []),
        ("C,&AB,D|-A", "2", ["A,B,C,D|-A"]),
        ("C,|AB|-D", "2", ["A,C|-D", "B,C|-D"]),
        (">AB,C|-D", "1", [">AB,C|-A", "B,C|-D"]),
        ("A,0|-D", "2", []),
    ],
)
def test_a_rule_leaves_its_premises_to_prove(sequent, step, premises):
    others = goals_of("A|-A")
    assert sequents(prove(goals_of(sequent) + others, step)) == [*premises, "A|-A"]


@pytest.mark.parametrize(
    ("sequent", "steps"),
    [
        ("|-A", [*RULES, "", "ix", "is", "0", "b", "é", "\u0661"]),
        ("|->AB", ["s", "l", "r", "x", "1"]),
        ("A|-&AB", ["i", "l", "r", "x", "1", "2"]),
        ("A|-|AB", ["i", "s", "x", "1"]),
        ("&AB|-A", ["x", "2", "i"]),
        ("A,>AB|-B", ["x", "1", "3"]),
    ],
)
def test_what_is_no_valid_inference_is_refused(sequent, steps):
    for step in steps:
        with pytest.raises(Invalid):
            prove(goals_of(sequent), step)


def test_nothing_can_be_done_where_nothing_is_left_to_prove():
    for step in RULES:
        with pytest.raises(Invalid):
            prove((), step)


def test_conjunction_commutes():
    goals = proposition(">&AB&BA")
    for step in "i1sxx":
        goals = prove(goals, step)
    assert goals == ()


def true(formula, model) -> bool:
    match formula:
        case ("&", p, q):
            return true(p, model) and true(q, model)
        case ("|", p, q):
            return true(p, model) or true(q, model)
        case (">", p, q):
            return not true(p, model) or true(q, model)
    return model.get(formula[0], False)


def holds(goals) -> bool:
    """Whether every goal is true in all classical models."""
    models = [dict(zip("ABCDEF", bits, strict=True)) for bits in itertools.product((False, True), repeat=6)]
    return all(
        true(goal, model) or not all(true(h, model) for h in hypotheses)
        for hypotheses, goal in goals
        for model in models
    )


def random_formula(rng, depth):
    symbol = rng.choice("&|>ABC0") if depth else rng.choice("ABC")
    return symbol + "".join(random_formula(rng, depth - 1) for _ in range(CONNECTIVES[symbol]))


@hypothesis.given(st.randoms(use_true_random=False))
@hypothesis.settings(max_examples=100, deadline=None)
def test_a_step_to_goals_that_hold_starts_from_a_goal_that_holds(rng):
    goals = proposition(random_formula(rng, 3))
    for _ in range(25):
        before = goals
        try:
            goals = prove(goals, rng.choice(RULES))
        except Invalid:
            continue
        assert holds(before) or not holds(goals)
        if not goals:
            break


def test_what_only_holds_classically_cannot_be_proved():
    """All steps to depth 6 from the excluded middle and Peirce's law."""
    for formula in ("|A>A0", ">>>ABAA"):
        assert holds(proposition(formula))
        level = {proposition(formula)}
        for _ in range(6):
            level = {after for goals in level for after in _successors(goals)}
            assert () not in level


def _successors(goals):
    for step in RULES:
        with contextlib.suppress(Invalid):
            yield prove(goals, step)


@pytest.mark.parametrize("bad", ["", "&A", "AB", "G", ">A", "|", "&ABC"])
def test_what_is_no_formula_is_refused(bad):
    with pytest.raises(ValueError, match="term"):
        proposition(bad)


def test_states_are_values():
    state, rng = equation("=*ss0ss0ssss0"), random.Random(0)
    shown = text(state.focus)
    for _ in range(50):
        step = rng.choice(["lm", "la", "lc", "rz", "l.", "q"])
        with contextlib.suppress(Invalid):
            rewrite(state, step)
        assert text(state.focus) == shown
    assert kernel.equation(shown).above is None
