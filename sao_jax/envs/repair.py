"""Repairing a miniature repository: look around, edit, run the visible tests, submit; hidden tests decide.

    b(2)=10?view b;a(x)*2.view a;x+2.edit a=x+3;ok.test;pass.submit;
    prompt  action obs ...                                   action

File `b` holds the body of the function b(x): `a(x)*2`. Bodies are expressions over x, numbers, `+ - *`, parentheses and
calls of files that come earlier in the alphabet, so that recursion cannot be written. One operator, or one callee, of
one file is wrong. The actions, each ended by `;`:

    list;          a,b.                          the files
    view a;        x+2.                          the body of a file
    edit a=x+3;    ok.                           another body for a file
    test;          pass. or b(2)=8 not 10.       the first visible test that fails
    submit;                                      ends the attempt

Whatever else is written, or cannot be parsed, is answered `error.`; a value that is too large is shown as `!`. The
reward is 1 if the last file, the root, is right on the inputs of the visible tests and on the hidden ones, which are
all others from 0 to 9; else 0. Bodies are read and evaluated here, nothing of them is given to Python.
"""

import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Sequence
from typing import Any

from sao_jax.data.protocols import Outcome
from sao_jax.data.tokenizers import WordTokenizer
from sao_jax.envs.base import TaskFamily
from sao_jax.envs.expressions import evaluate, parse_expression

FILES = "abcdef"
LONGEST = 16  # characters of a body
INPUTS = range(10)
MAX_CALLS = 100  # of functions, for one value
ERROR = "error."
WORDS = ("list", "view", "edit", "test", "submit", "ok", "pass", "not", "error", "fail")

_TOKEN = re.compile(r"0|[1-9][0-9]*|[-+*()a-fx]")
_EDIT = re.compile(r"edit ([a-f])=([^;]*);")
_VIEW = re.compile(r"view ([a-f]);")
_LEAVES = ("x{o}{n}", "{n}{o}x")
_CALLERS = ("{f}(x){o}{n}", "{n}{o}{f}(x)", "{f}(x){o}x", "x{o}{f}(x)", "{f}(x{o}{n})")


@dataclasses.dataclass(frozen=True)
class Level:
    """What repositories of a level are like.

    Attributes:
      files: how many files; one of these.
      depth: how many of them are on the path of calls, the root included; one of these.
      told: the prompt shows a visible test; else it says only that one fails.
      callees: what is wrong may be a callee; else it is an operator.
      visible: number of visible tests.
      max_tokens, max_turns: of an attempt. The expert needs about half; the rest is for trying other repairs.
    """

    files: tuple[int, ...]
    depth: tuple[int, ...]
    told: bool
    callees: bool
    visible: int
    max_tokens: int
    max_turns: int


LEVELS = {
    1: Level((2,), (2,), True, False, 1, 128, 12),
    2: Level((3,), (2, 3), True, True, 1, 144, 14),
    3: Level((4, 5), (3,), False, True, 2, 176, 16),
    4: Level((6,), (4, 5), False, True, 2, 208, 18),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """broken, right: the bodies of files a, b, ...; visible: inputs of the root that are tested openly."""

    broken: tuple[str, ...]
    right: tuple[str, ...]
    visible: tuple[int, ...]
    told: bool

    @property
    def root(self) -> str:
        return FILES[len(self.right) - 1]


class Repair(TaskFamily):
    """Repair problems, and demonstrations by an expert whose work can be made unreliable.

    In every problem exactly one change of an operator (or of a callee) satisfies the visible tests.

    Args:
      level: 1 two files, 2 three, 3 four or five, 4 six; from 3 on the prompt says only that a test fails. 0 draws it
        anew for each instance, so that difficulty differs between them.
      noise: share of demonstrations whose first edit is a wrong one.
      skip: share of demonstrations that submit without running the tests after an edit.
      habit: share of the wrong edits that put the wrong operator in the right place, always the same one; the others
        are any wrong change of a file on the path, and show how a repair goes on after an edit of the wrong file.
    """

    name = "repair"
    stop = ";"
    tokenizer = WordTokenizer(WORDS, FILES + "x0123456789+-*()=?;.,!")

    def __init__(self, level: int = 1, noise: float = 0.7, skip: float = 0.6, habit: float = 0.5):
        if level not in (0, *LEVELS):
            raise ValueError(f"level is {level}; allowed: 1 to 4, or 0 for all of them")
        for name, share in (("noise", noise), ("skip", skip), ("habit", habit)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; it is a share, from 0 to 1")
        self.level, self.noise, self.skip, self.habit = level, noise, skip, habit
        self.max_tokens, self.max_turns = LEVELS[level or 4].max_tokens, LEVELS[level or 4].max_turns

    def sample(self, rng: random.Random) -> Problem:
        level = LEVELS[self.level or rng.randint(1, 4)]
        while True:
            problem = plant(level, rng)
            if problem is not None:
                return problem

    def split_key(self, problem: Problem) -> tuple[str, ...]:
        """The repository: the same one with other tests, or with another bug, has the same repair to learn by heart."""
        return problem.right

    def prompt(self, problem: Problem) -> str:
        if not problem.told:
            return "fail?"
        return f"{problem.root}({problem.visible[0]})={root_value(problem.right, problem.visible[0])}?"

    def respond(self, problem: Problem, actions: Sequence[str]) -> Outcome:
        files, action = edited(problem, actions), actions[-1]
        if action == "submit;":
            right = [root_value(files, x) == root_value(problem.right, x) for x in INPUTS]
            visible = float(all(right[x] for x in problem.visible))
            hidden = float(all(right[x] for x in INPUTS if x not in problem.visible))
            parts = {"visible": visible, "hidden": hidden}
            return Outcome(reward=visible * hidden, end="terminated", reason="submitted", parts=parts)
        if action == "list;":
            return Outcome(observation=",".join(FILES[: len(files)]) + ".")
        if action == "test;":
            return Outcome(observation=tested(problem, files))
        if (match := _VIEW.fullmatch(action)) and FILES.index(match[1]) < len(files):
            return Outcome(observation=files[FILES.index(match[1])] + ".")
        return Outcome(observation="ok." if _edit(action, len(files)) else ERROR)

    def expert(self, problem: Problem, actions: Sequence[str], rng: random.Random) -> str:
        """Looks, edits, tests and submits; from any state. A wrong edit is seen by the tests, if they are run."""
        wrong, skip = rng.random() < self.noise, rng.random() < self.skip
        spoilt = wrong_edit(problem, rng.random() < self.habit, rng)
        path = call_path(problem.broken)
        looks = [] if problem.told else ["list;", "test;"]
        for action in looks + [f"view {f};" for f in path]:
            if action not in actions:
                return action
        files = edited(problem, actions)
        edits = [a for a in actions if _edit(a, len(files))]
        if wrong and not edits:
            return spoilt
        if actions and actions[-1] in edits:
            return "submit;" if skip else "test;"
        for name, body, right in zip(FILES, files, problem.right, strict=False):
            if body != right:
                return f"edit {name}={right};"
        return "submit;"


def plant(level: Level, rng: random.Random) -> Problem | None:
    """A repository with a bug; None if the draw is unsuitable: values too large, or another repair passes as well."""
    count = rng.choice(level.files)
    depth = rng.choice([d for d in level.depth if d <= count])
    path = [*sorted(rng.sample(range(count - 1), depth - 1)), count - 1]
    below = {caller: callee for callee, caller in itertools.pairwise(path)}
    bodies = []
    for index in range(count):
        template = rng.choice(_LEAVES if index in (0, path[0]) else _CALLERS)
        callee = below[index] if index in below else rng.randrange(max(index, 1))
        bodies.append(template.format(f=FILES[callee], o=rng.choice("+-*"), n=rng.randint(1, 9)))
    right = tuple(bodies)
    values = [root_value(right, x) for x in INPUTS]
    if None in values or min(values) < 0 or max(values) > 999:
        return None
    _, broken = rng.choice(changes(right, call_path(right), level.callees))
    visible = tuple(rng.sample(INPUTS, level.visible))
    problem = Problem(broken, right, visible, level.told)
    fixes = [files for _, files in changes(broken, call_path(broken), level.callees)]
    passing = [files for files in [broken, *fixes] if tested(problem, files) == "pass."]
    return problem if passing == [problem.right] else None


def changes(files: tuple[str, ...], names: Sequence[str], callees: bool) -> list[tuple[str, tuple[str, ...]]]:
    """(action, files after it): every edit of one of the named files in one operator, or if `callees` one callee."""
    found = []
    for name in names:
        index = FILES.index(name)
        body = files[index]
        for at, old in enumerate(body):
            allowed = "+-*" if old in "+-*" else FILES[:index] if callees and old in FILES else ""
            for new in allowed:
                if new != old:
                    changed = body[:at] + new + body[at + 1 :]
                    found.append((f"edit {name}={changed};", (*files[:index], changed, *files[index + 1 :])))
    return found


def wrong_edit(problem: Problem, habitual: bool, rng: random.Random) -> str:
    """Another operator somewhere on the path, or the habitual one: the first that there is in the broken file."""
    path = call_path(problem.broken)
    if habitual:
        path = [f for f, body, right in zip(FILES, problem.broken, problem.right, strict=False) if body != right]
    wrong = [action for action, files in changes(problem.broken, path, callees=False) if files != problem.right]
    return wrong[0] if habitual else rng.choice(wrong)


def call_path(files: Sequence[str]) -> list[str]:
    """The files that the root calls, itself first, in the order in which a reader comes upon them."""
    path = [FILES[len(files) - 1]]
    for name in path:
        path += [c for c in files[FILES.index(name)] if c in FILES and c not in path]
    return path


def edited(problem: Problem, actions: Sequence[str]) -> tuple[str, ...]:
    """The files after these actions."""
    files = list(problem.broken)
    for action in actions:
        if edit := _edit(action, len(files)):
            files[edit[0]] = edit[1]
    return tuple(files)


def _edit(action: str, count: int) -> tuple[int, str] | None:
    """(index of the file, new body), or None if the action is no edit or not an acceptable one."""
    match = _EDIT.fullmatch(action)
    if match is None:
        return None
    name, body = match.groups()
    accepted = FILES.index(name) < count and parse(body) is not None and all(c < name for c in body if c in FILES)
    return (FILES.index(name), body) if accepted else None


def tested(problem: Problem, files: tuple[str, ...]) -> str:
    """What the visible tests say."""
    for x in problem.visible:
        value, right = root_value(files, x), root_value(problem.right, x)
        if value != right:
            return f"{problem.root}({x})={'!' if value is None else value} not {right}."
    return "pass."


@functools.lru_cache(4096)
def root_value(files: tuple[str, ...], x: int) -> int | None:
    """The value of the last file's function. None if a number on the way is too large, or the calls too many."""
    calls = 0

    def call(name: str, arguments: tuple[int, ...]) -> int:
        nonlocal calls
        calls += 1
        if calls > MAX_CALLS:
            raise OverflowError
        return evaluate(parse(files[FILES.index(name)]), {"x": arguments[0]}, call)

    try:
        return call(FILES[len(files) - 1], (x,))
    except OverflowError:
        return None


@functools.lru_cache(4096)
def parse(body: str) -> Any:
    """A body as a tree: see `expressions`. None if it is none."""
    tokens = _TOKEN.findall(body)
    if "".join(tokens) != body or len(body) > LONGEST:
        return None
    return parse_expression(tokens, "x", FILES.__contains__, arity=1)
