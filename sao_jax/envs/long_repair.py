"""Repairing a repository of up to 20 files and 5,000 lines in which a change was not carried through.

    swap f3?find f3;1:1,2:1.find 1:f3;2:f3(y,x)=x*2-y.find 2:f3;3:f7(x)=f3(x,4)+1.edit 2:3=f7(x)=f3(4,x)+1;ok.test;...
    prompt  action  obs ...

A file is a list of lines, a line the definition of a function: `f7(x)=f3(x,4)+1`. Files and lines are numbered from 1.
One function, the target, was changed, but not everywhere: either call sites still follow the old form, or all of them
follow the new one and the definition does not. The prompt says what the change was:

    rename f3=g3?       f3 is called g3 now
    swap f3?            the arguments of f3 have changed places: f3(x,4) is f3(4,x) now
    add f3,6?           f3 has got a third argument, and every call gives 6 for it: f3(x,4) is f3(x,4,6) now

Apart from it, the target is always called with a number as its last argument and something else as its first. Actions:

    list;               1:4,2:4.                    the files and how many lines they have
    find f3;            1:1,2:2.                    in which files, and how many lines of each, the name stands
    find 2:f3;          3:f7(x)=f3(x,4)+1.          the first SHOWN lines of a file in which it stands; `+2.` follows if
                                                    there are 2 more
    view 2:3;           3:f7(x)=f3(x,4)+1.4:...     SHOWN lines of a file from a line on
    edit 2:3=f7(x)=x;   ok.                         another text for a line
    replace 2:f3=g3;    1.                          another name for a name everywhere in a file, in so many lines
    test;               pass. or f7(5)=! not=12.   the first visible test that fails
    submit;                                         ends the attempt

Whatever else is written, or is no definition, is answered `error.`. A value that is too large or that cannot be had
(no such function, another number of arguments) is shown as `!`. The reward is 1 if the visible tests pass and the
hidden ones, which call the target by its new form and every function that calls it, also those of changed lines.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sao_jax.data.protocols import Outcome
from sao_jax.data.tokenizers import WordTokenizer
from sao_jax.envs.base import TaskFamily
from sao_jax.envs.expressions import evaluate, parse_expression

MOST_FILES, MOST_LINES = 20, 5000
SHOWN = 6  # lines that one action can show
LONGEST = 40  # characters of a line
DEPTH, CALLS = 10, 200  # of calls within each other, and of all calls for one value
INPUTS = range(10)
ERROR = "error."
KINDS = ("rename", "swap", "add")
BUGS = {"rename": ("rename",), "signature": ("swap", "add"), "mixed": KINDS}
WORDS = ("list", "find", "view", "edit", "replace", "test", "submit", "ok", "pass", "not", "error", "rename", "swap")

_NAME = r"[fg](?:0|[1-9][0-9]{0,3})"
_NUMBER = r"[1-9][0-9]{0,3}"
_TOKEN = re.compile(rf"{_NAME}|0|[1-9][0-9]*|[-+*(),xyz]")
_DEFINITION = re.compile(rf"({_NAME})\(([xyz](?:,[xyz]){{0,2}})\)=(.+)")
_FIND = re.compile(rf"find (?:({_NUMBER}):)?({_NAME});")
_VIEW = re.compile(rf"view ({_NUMBER}):({_NUMBER});")
_EDIT = re.compile(rf"edit ({_NUMBER}):({_NUMBER})=([^;]*);")
_REPLACE = re.compile(rf"replace ({_NUMBER}):({_NAME})=({_NAME});")

# The target tells its arguments apart: no two numbers give the same result in both orders for all x.
_TARGETS = ("x*{n}-y", "x*{n}+y", "x-y*{n}", "y-x*{n}")
_CALLERS = ("{c}{o}{n}", "{n}{o}{c}", "{c}{o}x", "x{o}{c}")
_FILLERS = ("x{o}{n}", "{n}{o}x", "f{f}(x){o}{n}", "{n}{o}f{f}(x)", "f{f}(x{o}{n})")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A repository and what is wrong with it.

    Attributes:
      kind: one of KINDS. target: number of the function that was changed. extra: argument that `add` adds.
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


class LongRepair(TaskFamily):
    """Problems of consistency between files, and demonstrations by an expert whose work can be made unreliable.

    Args:
      files: 2 (default) to 20. lines: of all files together, at least 4 for each file, at most 5,000.
      bug: rename (default), signature (swap or add), or mixed of all three.
      noise: share of demonstrations with a mistake.
      skip: share of demonstrations that submit without running the tests; they show it when a mistake is not seen.
      habit: share of the mistakes that leave the last wrong line as it is; the others write one wrong operator or, in a
        renaming, a name that is one off.
    """

    name = "long-repair"
    stop = ";"
    tokenizer = WordTokenizer((*WORDS, "add"), "fgxyz0123456789+-*()=:,;.?!")

    def __init__(
        self,
        files: int = 2,
        lines: int = 8,
        bug: str = "rename",
        noise: float = 0.7,
        skip: float = 0.8,
        habit: float = 0.7,
    ):
        if not 2 <= files <= MOST_FILES:
            raise ValueError(f"files is {files}; allowed: 2 to {MOST_FILES}")
        if not 4 * files <= lines <= MOST_LINES:
            raise ValueError(f"lines is {lines}; allowed with {files} files: {4 * files} to {MOST_LINES}")
        if bug not in BUGS:
            raise ValueError(f"bug is {bug!r}; allowed: {', '.join(BUGS)}")
        for name, share in (("noise", noise), ("skip", skip), ("habit", habit)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; it is a share, from 0 to 1")
        self.files, self.lines, self.bug = files, lines, bug
        self.noise, self.skip, self.habit = noise, skip, habit
        # At most files + 2 lines hold the target; an expert finds each, and edits each. The rest is for second looks.
        digits = len(str(lines))
        if bug == "rename":
            self.max_tokens = 64 + (files + 2) * (16 + 2 * digits)
        else:
            self.max_tokens = 64 + (files + 2) * (38 + 6 * digits) + files * (8 + digits)
        self.max_turns = 2 * files + 8

    def sample(self, rng: random.Random) -> Problem:
        return plant(self.files, self.lines, rng.choice(BUGS[self.bug]), rng)

    def prompt(self, problem: Problem) -> str:
        form = {"rename": f"={problem.new}", "swap": "", "add": f",{problem.extra}"}[problem.kind]
        return f"{problem.kind} {problem.old}{form}?"

    def respond(self, problem: Problem, actions: Sequence[str]) -> Outcome:
        edits: dict[tuple[int, int], str] = {}
        for action in actions:
            observation = apply_action(problem, edits, action)
        if action != "submit;":
            return Outcome(observation=observation)
        visible = float(run_tests(problem, edits) == "pass.")
        hidden = float(hidden_tests_pass(problem, edits))
        parts = {"visible": visible, "hidden": hidden}
        return Outcome(reward=visible * hidden, end="terminated", reason="submitted", parts=parts)

    def expert(self, problem: Problem, actions: Sequence[str], rng: random.Random) -> str:
        """Looks for the target file by file, mends what it sees, tests and submits; from any state."""
        wrong, habitual = rng.random() < self.noise, rng.random() < self.habit
        skip = rng.random() < self.skip
        edits: dict[tuple[int, int], str] = {}
        for action in actions:
            apply_action(problem, edits, action)
        search = f"find {problem.old};"
        if search not in actions:
            return search
        changed = [a for a in actions if a.startswith(("edit ", "replace "))]
        wrong_lines = to_repair(problem, edits)
        tested = "test;" in actions
        left = max((file for file, _, _ in problem.repairs), default=-1) if wrong and habitual and not tested else -1
        spoil = wrong and not habitual and not changed
        for file in holding(problem, problem.old):
            looked = f"find {file + 1}:{problem.old};"
            if problem.kind != "rename" and looked not in actions:
                return looked
            # Who makes a mistake does not see it before the tests show it.
            here = [
                (line, right)
                for at, line, right in wrong_lines
                if at == file != left and not (wrong and (at, line) in edits)
            ]
            if problem.kind == "rename" and any(
                holds(line_of(problem, edits, file, line), problem.old) for line, _ in here
            ):
                name = f"g{(problem.target + 1) % self.lines}" if spoil else problem.new
                return f"replace {file + 1}:{problem.old}={name};"
            if here:
                line, right = here[0]
                return f"edit {file + 1}:{line + 1}={slip(right, rng) if spoil else right};"
        if tested and wrong_lines and run_tests(problem, edits) != "pass.":
            file, line, right = wrong_lines[0]
            return f"edit {file + 1}:{line + 1}={right};"
        return "test;" if changed and not skip and actions[-1] != "test;" else "submit;"


def slip(text: str, rng: random.Random) -> str:
    """A line with one operator of its body exchanged."""
    at = rng.choice([i for i, character in enumerate(text) if character in "+-*"])
    return text[:at] + ("-" if text[at] == "+" else "+") + text[at + 1 :]


def plant(count: int, lines: int, kind: str, rng: random.Random) -> Problem:
    """A repository of `count` files with a change that was not carried through; every caller of a file's end may be."""
    numbers = rng.sample(range(lines), lines)
    target, *rest = numbers
    sites = count + 1
    callers, fillers = rest[:sites], rest[sites:]
    base = [f"f{f}(x)={rng.choice(_FILLERS[:2]).format(o=rng.choice('+-'), n=rng.randint(1, 9))}" for f in fillers[:1]]
    for f in fillers[1:]:
        # Only the first is called, so that values stay small however many lines there are.
        text = rng.choice(_FILLERS).format(o=rng.choice("+-"), n=rng.randint(1, 9), f=fillers[0])
        base.append(f"f{f}(x)={text}")
    extra = rng.randint(1, 9)
    body = rng.choice(_TARGETS).format(n=rng.randint(2, 5))
    definition = forms(kind, f"f{target}", "x", "y", "z", ("{c}=" + body, "+z"), extra)
    chosen = [
        forms(kind, f"f{target}", "x", str(rng.randint(1, 9)), str(extra), (f"f{f}(x)=" + template(rng), ""), extra)
        for f in callers
    ]
    everything = [definition, *chosen]
    if rng.random() < 0.25:
        stale = {0}
    else:
        stale = set(rng.sample(range(1, sites + 1), rng.randint(2, sites - 1 if kind != "rename" else sites)))
    changed = [(pair[1], index in stale and pair[0]) for index, pair in enumerate(everything)]
    # One place of the change in each file at least, the rest anywhere: what is to be seen is always spread.
    home = [*rng.sample(range(count), count), *(rng.randrange(count) for _ in range(len(everything) - count))]
    rooms: list[list[tuple[str, Any]]] = [[] for _ in range(count)]
    for file, entry in zip(home, changed, strict=True):
        rooms[file].append(entry)
    size = -(-lines // count)
    left = [(text, False) for text in base]
    for file, room in enumerate(rooms):
        room += [left.pop() for _ in range(min(size - len(room), len(left)))] if file + 1 < count else left
        rng.shuffle(room)
    files = tuple(tuple(broken or right for right, broken in room) for room in rooms)
    repairs = tuple(
        (file, line, right)
        for file, room in enumerate(rooms)
        for line, (right, broken) in enumerate(room)
        if broken and broken != right
    )
    names = tuple(f"f{f}" for f in callers)
    problem = Problem(kind, target, extra, files, repairs, names, ())
    seen = {name: [x for x in INPUTS if not same(problem, {}, name, (x,))] for name in names}
    wrong = [name for name in names if seen[name]]
    visible = [(name, rng.choice(seen[name])) for name in rng.sample(wrong, (len(wrong) + 1) // 2)]
    return dataclasses.replace(problem, visible=tuple(visible))


def template(rng: random.Random) -> str:
    """What a caller does with its call, which stands for {c}."""
    return rng.choice(_CALLERS).format(c="{c}", o=rng.choice("+-"), n=rng.randint(1, 9))


def forms(kind: str, name: str, x: str, y: str, z: str, text: tuple[str, str], extra: int) -> tuple[str, str]:
    """(old, new) form of a definition or a call: `text[0]` with it for {c}, with `text[1]` at its end if z counts."""
    old = text[0].format(c=f"{name}({x},{y})")
    if kind == "rename":
        return old, text[0].format(c=f"g{name[1:]}({x},{y})")
    if kind == "swap":
        return old, text[0].format(c=f"{name}({y},{x})")
    return old, text[0].format(c=f"{name}({x},{y},{z})") + text[1]


# -- what is in the files ----------------------------------------------------------------------------------------------


@functools.lru_cache(256)
def index(files: tuple[tuple[str, ...], ...]) -> dict[str, tuple[int, int]]:
    """Where each function is defined."""
    return {text[: text.index("(")]: (f, line) for f, lines in enumerate(files) for line, text in enumerate(lines)}


@functools.lru_cache(1024)
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
