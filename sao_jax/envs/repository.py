"""A repository of numbered files and lines, each line the definition of a function: what can be asked and done there.

The tools and the tests of `long_repair`, whose text tells what they answer. Lines are read and evaluated here, nothing
of them is given to Python. Files and lines are numbered from 1 in actions and observations, from 0 in the code.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sao_jax.envs.expressions import evaluate, parse_expression

SHOWN = 6  # lines that one action can show
LONGEST = 40  # characters of a line
DEPTH, CALLS = 10, 200  # of calls within each other, and of all calls for one value
INPUTS = range(10)
ERROR = "error."

_NAME = r"[fg](?:0|[1-9][0-9]{0,3})"
_NUMBER = r"[1-9][0-9]{0,3}"
_TOKEN = re.compile(rf"{_NAME}|0|[1-9][0-9]*|[-+*(),xyz]")
_DEFINITION = re.compile(rf"({_NAME})\(([xyz](?:,[xyz]){{0,2}})\)=(.+)")
_FIND = re.compile(rf"find (?:({_NUMBER}):)?({_NAME});")
_VIEW = re.compile(rf"view ({_NUMBER}):({_NUMBER});")
_EDIT = re.compile(rf"edit ({_NUMBER}):({_NUMBER})=([^;]*);")
_REPLACE = re.compile(rf"replace ({_NUMBER}):({_NAME})=({_NAME});")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A repository and what is wrong with it.

    Attributes:
      kind: rename, swap or add. target: number of the function that was changed. extra: argument that `add` adds.
      files: lines of each file, broken.
      repairs: (file, line, right text) of every line that is wrong; files and lines from 0.
      callers: names of the functions that call the target.
      visible: (name, x) of the tests that are run openly.
    """

    kind: str
    target: int
    extra: int
    files: tuple[tuple[str, ...], ...]
    repairs: tuple[tuple[int, int, str], ...]
    callers: tuple[str, ...]
    visible: tuple[tuple[str, int], ...]

    @property
    def old(self) -> str:
        return f"f{self.target}"

    @property
    def new(self) -> str:
        return f"g{self.target}" if self.kind == "rename" else self.old


@functools.lru_cache(64)
def index(files: tuple[tuple[str, ...], ...]) -> dict[str, tuple[int, int]]:
    """Where each function is defined."""
    return {text[: text.index("(")]: (f, line) for f, lines in enumerate(files) for line, text in enumerate(lines)}


@functools.lru_cache(128)
def _holding(files: tuple[tuple[str, ...], ...], name: str) -> tuple[tuple[int, int], ...]:
    return tuple((f, line) for f, lines in enumerate(files) for line, text in enumerate(lines) if holds(text, name))


def holding(problem: Problem, name: str, edits: Mapping = MappingProxyType({})) -> dict[int, list[int]]:
    """File -> its lines in which a name stands."""
    places = {place for place in _holding(problem.files, name) if place not in edits}
    places |= {place for place, text in edits.items() if holds(text, name)}
    found: dict[int, list[int]] = {}
    for file, line in sorted(places):
        found.setdefault(file, []).append(line)
    return found


def holds(text: str, name: str) -> bool:
    at = text.find(name)
    while at >= 0:
        if not text[at + len(name) : at + len(name) + 1].isdigit():
            return True
        at = text.find(name, at + 1)
    return False


def line_of(problem: Problem, edits: Mapping, file: int, line: int) -> str:
    return edits.get((file, line), problem.files[file][line])


@functools.lru_cache(4096)
def define(text: str) -> tuple[str, tuple[str, ...], Any] | None:
    """(name, parameters, tree of the body) of a line, or None if it is no definition."""
    match = _DEFINITION.fullmatch(text) if len(text) <= LONGEST else None
    if match is None:
        return None
    parameters = tuple(match[2].split(","))
    tokens = _TOKEN.findall(match[3])
    if len(set(parameters)) < len(parameters) or "".join(tokens) != match[3]:
        return None
    tree = parse_expression(tokens, parameters, lambda token: token[0] in "fg")
    return None if tree is None else (match[1], parameters, tree)


def to_repair(problem: Problem, edits: Mapping[tuple[int, int], str]) -> list[tuple[int, int, str]]:
    """(file, line, right text) of every line that is not as it should be, whoever wrote it."""
    right = {place: problem.files[place[0]][place[1]] for place in edits}
    right |= {(file, line): text for file, line, text in problem.repairs}
    return [(*place, text) for place, text in sorted(right.items()) if line_of(problem, edits, *place) != text]


def apply_action(problem: Problem, edits: dict[tuple[int, int], str], action: str) -> str:
    """What an action is answered; `edits` becomes that after it. Submitting changes nothing and is answered ``."""
    files = problem.files
    if action == "submit;":
        return ""
    if action == "list;":
        return ",".join(f"{f}:{len(lines)}" for f, lines in enumerate(files, start=1)) + "."
    if action == "test;":
        return run_tests(problem, edits)
    if match := _FIND.fullmatch(action):
        found = holding(problem, match[2], edits)
        if match[1] is None:
            return (",".join(f"{f + 1}:{len(lines)}" for f, lines in found.items()) or "0") + "."
        return show(problem, edits, int(match[1]) - 1, found.get(int(match[1]) - 1, []))
    if (match := _VIEW.fullmatch(action)) and _exists(files, match):
        file, first = int(match[1]) - 1, int(match[2]) - 1
        return show(problem, edits, file, range(first, min(first + SHOWN, len(files[file]))))
    if (match := _EDIT.fullmatch(action)) and _exists(files, match) and define(match[3]):
        edits[int(match[1]) - 1, int(match[2]) - 1] = match[3]
        return "ok."
    if (match := _REPLACE.fullmatch(action)) and int(match[1]) <= len(files):
        file = int(match[1]) - 1
        lines = holding(problem, match[2], edits).get(file, [])
        renamed = {
            (file, i): re.sub(match[2] + r"(?![0-9])", match[3], line_of(problem, edits, file, i)) for i in lines
        }
        if any(define(text) is None for text in renamed.values()):  # too long
            return ERROR
        edits |= renamed
        return f"{len(lines)}."
    return ERROR


def _exists(files: Sequence[Sequence[str]], match: re.Match) -> bool:
    return int(match[1]) <= len(files) and int(match[2]) <= len(files[int(match[1]) - 1])


def show(problem: Problem, edits: Mapping, file: int, lines: Sequence[int]) -> str:
    """Lines with their numbers, and how many more there are."""
    shown = "".join(f"{i + 1}:{line_of(problem, edits, file, i)}." for i in lines[:SHOWN])
    more = len(lines) - SHOWN
    return (shown or "0.") + (f"+{more}." if more > 0 else "")


# -- tests -------------------------------------------------------------------------------------------------------------


def value(problem: Problem, edits: Mapping[tuple[int, int], str], name: str, arguments: tuple[int, ...]) -> int | None:
    """Of a function of the edited files; None if there is none. Of two functions of a name the edited one counts."""
    written = {text[: text.index("(")]: text for text in edits.values()}
    places = index(problem.files)
    calls = depth = 0

    def call(name: str, arguments: tuple[int, ...]) -> int:
        nonlocal calls, depth
        if name not in written and (name not in places or places[name] in edits):
            raise KeyError(name)
        text = written[name] if name in written else problem.files[places[name][0]][places[name][1]]
        _, parameters, tree = define(text)
        calls, depth = calls + 1, depth + 1
        if len(parameters) != len(arguments) or calls > CALLS or depth > DEPTH:
            raise OverflowError
        result = evaluate(tree, dict(zip(parameters, arguments, strict=True)), call)
        depth -= 1
        return result

    try:
        return call(name, arguments)
    except (OverflowError, KeyError):
        return None


def right_value(problem: Problem, name: str, arguments: tuple[int, ...]) -> int | None:
    return value(problem, {(file, line): text for file, line, text in problem.repairs}, name, arguments)


def same(problem: Problem, edits: Mapping, name: str, arguments: tuple[int, ...]) -> bool:
    return value(problem, edits, name, arguments) == right_value(problem, name, arguments)


def run_tests(problem: Problem, edits: Mapping) -> str:
    """What the visible tests say."""
    for name, x in problem.visible:
        got, right = value(problem, edits, name, (x,)), right_value(problem, name, (x,))
        if got != right:
            return f"{name}({x})={'!' if got is None else got} not={right}."
    return "pass."


def hidden_tests_pass(problem: Problem, edits: Mapping[tuple[int, int], str]) -> bool:
    """Whether the target and whatever calls it or was touched has the right values."""
    named = set(problem.callers)
    for (file, line), text in edits.items():
        named |= {text[: text.index("(")], problem.files[file][line][: problem.files[file][line].index("(")]}
    named -= {problem.old, problem.new}
    points = [(4, 7), (3, 1)] if problem.kind != "add" else [(4, 7, 2), (3, 1, 5)]
    return all(same(problem, edits, problem.new, point) for point in points) and all(
        same(problem, edits, name, (x,)) for name in sorted(named) for x in INPUTS
    )
