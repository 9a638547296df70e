"""Whether an answer is right: outputs of programs, and mathematics.

    verdicts(sandbox.run(source, [[2], [3]]), [4, 9])       # [True, True]
    math_reward("So it is \\boxed{\\frac34}.", "0.75")      # 1.0

Every rule errs on the side of refusing: what cannot be read is never right, not even if both sides are the same
unreadable text.
"""

import functools
import importlib.util
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from sao_jax.envs.sandbox import Limits, Result, Sandbox

# ---- outputs of programs


def verdicts(result: Result, expected: Sequence[Any]) -> list[bool]:
    """For each expected value, whether the program's call returned it."""
    if result.status != "done" or len(result.values) != len(expected):
        return [False] * len(expected)
    calls = zip(expected, result.values, result.errors, strict=True)
    return [not error and same_value(right, got) for right, got, error in calls]


def same_value(expected: Any, got: Any, tolerance: float = 1e-6) -> bool:
    """Equality of plain data. Integers are compared exactly, other numbers up to `tolerance` (relative above 1).

    A bool is no number, None equals None alone (not "None"), a list equals a tuple, NaN equals nothing.
    """
    if isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)):
        return len(expected) == len(got) and all(map(same_value, expected, got, [tolerance] * len(got)))
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(same_value(expected[k], got[k], tolerance) for k in got)
    if type(expected) in (int, float) and type(got) in (int, float):
        return _same_number(expected, got, tolerance)
    return type(expected) is type(got) and expected == got


def same_output(expected: str, got: str, tolerance: float = 1e-6) -> bool:
    """Equality of printed text, word by word; numbers as in `same_value`.

    Lines count, spaces within and after them and empty lines at the end do not.
    """
    right, given = ([line.split() for line in text.rstrip().split("\n")] for text in (expected, got))
    return [len(line) for line in right] == [len(line) for line in given] and all(
        _same_word(a, b, tolerance) for x, y in zip(right, given, strict=True) for a, b in zip(x, y, strict=True)
    )


def _same_number(expected: float, got: float, tolerance: float) -> bool:
    if expected == got or type(expected) is type(got) is int:
        return expected == got
    try:
        # A NaN or an infinity makes this False.
        return abs(expected - got) <= tolerance * max(1.0, abs(expected)) < math.inf
    except OverflowError:  # an integer that no float can hold
        return False


def _same_word(expected: str, got: str, tolerance: float) -> bool:
    if expected == got:
        return True
    numbers = [_word_number(word) for word in (expected, got)]
    return None not in numbers and _same_number(*numbers, tolerance)


def _word_number(word: str) -> float | None:
    if len(word) > 1000 or not re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", word, re.IGNORECASE):
        return None
    number = int(word) if re.fullmatch(r"[-+]?[0-9]+", word) else float(word)
    return None if number in (math.inf, -math.inf) else number


# ---- mathematics

MAX_ANSWER = 300  # characters; a longer answer is not read
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_SIGNED = rf"[-+]?\s*(?:{_NUMBER})"
# Only what is listed is a unit: `12x`, `12 million` and `2 pi` are other numbers than 12 and 2.
_UNIT = re.compile(
    r"([cdk]m|mm|m|inch(?:es)?|in|ft|foot|feet|yard|yd|mile|mi|met(?:er|re)|[mk]g|g|gram|lb|pound|oz|ton|s|sec|second|"
    r"min|minute|h|hr|hour|day|week|month|year|ml|l|lit(?:er|re)|degree|deg|mph|dollar|cent|unit)s?(?:\^?[23])?"
)
_QUANTITY = re.compile(
    rf"(?P<sign>[-+]?)\s*(?P<currency>[$€£]?)\s*(?P<sign2>[-+]?)\s*"
    rf"(?:(?P<number>{_NUMBER})(?:e(?P<exponent>[-+]?[0-9]{{1,3}}))?(?:\s*/\s*(?P<below>{_NUMBER}))?"
    rf"|\\frac\{{\s*(?P<top>{_SIGNED})\s*\}}\{{\s*(?P<bottom>{_SIGNED})\s*\}})"
    r"(?P<unit>\s*(?:%|°|[a-z][a-z0-9 /^]*))?",
    re.IGNORECASE,
)
_LAST_NUMBER = re.compile(rf"(?<![\w.,])-?(?:{_NUMBER})(?:e[-+]?[0-9]+)?(?:/[0-9]+)?%?", re.IGNORECASE)
_ASSIGNED = re.compile(r"^\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\([a-z]\))?\s*=\s*")
_UNREADABLE = re.compile(r"\\?(nan|undefined|none|null|error)", re.IGNORECASE)


def extract_answer(text: str, strict: bool = True) -> str | None:
    """The answer that a text marks: the content of its last `\\boxed{}`, or else what follows its last `####`.

    An unclosed last box is no answer, whatever was boxed before. With `strict` off, a text that marks nothing answers
    with its last number.
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start >= 0:
        return _braced(text, text.index("{", start))
    _, marker, rest = text.rpartition("####")
    if marker:
        return rest.lstrip(" ").split("\n")[0].strip() or None
    if strict:
        return None
    numbers = _LAST_NUMBER.findall(text.replace("\u2212", "-"))
    return numbers[-1].rstrip(".") if numbers else None


def math_reward(text: str, reference: str, strict: bool = True, timeout_s: float = 2.0) -> float:
    """1.0 if the answer of a text (see `extract_answer`) equals the reference, else 0.0. No text raises."""
    answer = extract_answer(text, strict)
    return float(answer is not None and math_equal(answer, reference, timeout_s))


def math_equal(answer: str, reference: str, timeout_s: float = 2.0) -> bool:
    """Whether two answers, as LaTeX or plain text, boxed or marked or bare, are the same mathematical object.

    - Numbers are equal exactly; `,` separates thousands, in threes; `35%` is 7/20, so a bare 35 is not 35%.
    - A common unit or a currency on one side only is ignored; on both sides it must be the same (nothing is converted).
    - `(...)`, `[...]` and mixtures: brackets and order matter. `\\{...\\}` and bare lists: order does not.
    - Other text is equal to itself, if it has a letter or a digit. NaN and its like equal nothing.
    - Everything else is for math-verify to say, in a process with limits on time and memory; out of them means no. An
      expression equals its value, so where working it out is the task, ask for a number before.

    Works in any thread. Raises ImportError if math-verify is missing (`pip install 'sao_jax[math]'`).
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("math answers need math-verify: pip install 'sao_jax[math]'")
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s is {timeout_s}; a limit is above 0")
    sides = [_clean(_unmarked(text)) for text in (answer, reference)]
    return all(_readable(side) for side in sides) and _equal(*sides, timeout_s)


def _equal(answer: str, reference: str, timeout_s: float) -> bool:
    quantities = _quantity(answer), _quantity(reference)
    if None not in quantities:
        (value, unit), (right, right_unit) = quantities
        return value == right and (unit == right_unit or not unit or not right_unit)
    if not (_readable(answer) and _readable(reference)):
        return False
    if answer == reference:
        return True
    if ("=" in answer) != ("=" in reference):  # `x = 3` answers 3, `1 = 3` does not
        answer, reference = (_ASSIGNED.sub("", side) for side in (answer, reference))
        return "=" not in answer + reference and _equal(answer, reference, timeout_s)
    lists = _items(answer), _items(reference)
    if None not in lists:
        return _equal_items(*lists, timeout_s)
    result = _symbolic(timeout_s).run(None, [[answer, reference]], "equal")
    return result.values == (True,)


def _equal_items(answer: tuple[str, list[str]], reference: tuple[str, list[str]], timeout_s: float) -> bool:
    (kind, given), (right_kind, right) = answer, reference
    if kind != right_kind or len(given) != len(right):
        return False
    if kind:
        return all(_equal(a, b, timeout_s) for a, b in zip(given, right, strict=True))
    left = list(right)
    for item in given:
        match = next((other for other in left if _equal(item, other, timeout_s)), None)
        if match is None:
            return False
        left.remove(match)
    return True


@functools.cache
def _symbolic(timeout_s: float) -> Sandbox:
    limits = Limits(cpu_s=timeout_s, wall_s=10 * timeout_s, memory_mb=2048)
    return Sandbox(limits, module="sao_jax.envs.math_worker")


def _unmarked(text: str) -> str:
    return (extract_answer(text) or "") if re.search(r"\\boxed|\\fbox|####", text) else text


def _braced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and the one that closes it."""
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return text[start + 1 : match.start()].strip()
    return None


def _clean(text: str) -> str:
    """One spelling for what has several; never part of a longer command."""
    text = text.strip()
    if len(text) > MAX_ANSWER:
        return ""
    text = text.replace("\u2212", "-").replace("\\$", "$").replace("\\%", "%")
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1]
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[!,;:]|(?<!\\)\\ ", "", text)
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))", "°", text)
    text = text.replace(">=", "\\ge ").replace("<=", "\\le ")
    text = re.sub(r"(?<=[0-9])\s*per\s?cent\b", "%", text)
    return re.sub(r"\s+", " ", text).strip().rstrip(".").strip()


def _readable(text: str) -> bool:
    return bool(re.search(r"\w|\\[a-z]", text)) and not _UNREADABLE.fullmatch(text)


def _quantity(text: str) -> tuple[Fraction, str] | None:
    """(value, unit) of a number, "" being no unit. None for anything else."""
    match = _QUANTITY.fullmatch(text)
    if match is None or (match["sign"] and match["sign2"]):
        return None
    if match["top"]:
        top, bottom = _fraction(match["top"]), _fraction(match["bottom"])
    else:
        top, bottom = _fraction(match["number"]), _fraction(match["below"] or "1")
        top *= Fraction(10) ** int(match["exponent"] or 0)
    if bottom == 0:
        return None
    value = top / bottom * (-1 if "-" in (match["sign"], match["sign2"]) else 1)
    unit = (match["unit"] or "").lower()
    if unit.strip() == "%":
        return value / 100, ""
    if unit.strip() not in ("", "°"):
        words = re.split(r"/| per ", re.sub(r"^ (?:sq|square|cubic) ", " ", unit).strip())
        # A letter that touches its number is a variable.
        if not all(map(_UNIT.fullmatch, words)) or re.fullmatch("[a-z]", unit):
            return None
    return value, match["currency"] + unit.strip()


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))


def _items(text: str) -> tuple[str, list[str]] | None:
    """(brackets, items) of a tuple, interval, set or list at the top level; sets and bare lists have no brackets."""
    for opening, closing in (("\\{", "\\}"), ("{", "}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")):
        if text.startswith(opening) and text.endswith(closing):
            items = _split(text[len(opening) : -len(closing)])
            if items is not None and (len(items) > 1 or "{" in opening):
                return "" if "{" in opening else opening + closing, items
    items = _split(text)
    return ("", items) if items is not None and len(items) > 1 else None


def _split(text: str) -> list[str] | None:
    """The parts between commas outside brackets; None if brackets do not match."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts] if depth == 0 and all(part.strip() for part in parts) else None
