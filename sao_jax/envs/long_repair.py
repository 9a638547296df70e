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
import random
from collections.abc import Sequence

from sao_jax.data.protocols import Outcome
from sao_jax.data.tokenizers import WordTokenizer
from sao_jax.envs.base import TaskFamily
from sao_jax.envs.repository import (
    INPUTS,
    Problem,
    apply_action,
    hidden_tests_pass,
    holding,
    holds,
    line_of,
    run_tests,
    same,
    to_repair,
)

MOST_FILES, MOST_LINES = 20, 5000
KINDS = ("rename", "swap", "add")
BUGS = {"rename": ("rename",), "signature": ("swap", "add"), "mixed": KINDS}
WORDS = ("list", "find", "view", "edit", "replace", "test", "submit", "ok", "pass", "not", "error", *KINDS)

# The target tells its arguments apart: no two numbers give the same result in both orders for all x.
_TARGETS = ("x*{n}-y", "x*{n}+y", "x-y*{n}", "y-x*{n}")
_CALLERS = ("{c}{o}{n}", "{n}{o}{c}", "{c}{o}x", "x{o}{c}")
_FILLERS = ("x{o}{n}", "{n}{o}x", "f{f}(x){o}{n}", "{n}{o}f{f}(x)", "f{f}(x{o}{n})")


class LongRepair(TaskFamily):
    """Problems of consistency between files, and demonstrations by an expert whose work can be made unreliable.

    Args:
      files: 2 (default) to 20. lines: of all files together, at least 4 for each file, at most 5,000.
      bug: rename (default), signature (swap or add), or mixed of all three.
      noise: share of demonstrations with a mistake.
      skip: share of demonstrations that submit without running the tests; they show it when a mistake is not seen.
      habit: share of the mistakes that leave the last file with wrong lines as it is; the others write one wrong
        operator or, in a renaming, a name that is one off.
    """

    name = "long-repair"
    stop = ";"
    tokenizer = WordTokenizer(WORDS, "fgxyz0123456789+-*()=:,;.?!")

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
            here = [line for at, line, _ in wrong_lines if at == file != left and not (wrong and (at, line) in edits)]
            if any(problem.kind == "rename" and holds(line_of(problem, edits, file, i), problem.old) for i in here):
                name = f"g{(problem.target + 1) % self.lines}" if spoil else problem.new
                return f"replace {file + 1}:{problem.old}={name};"
            if here:
                right = next(text for at, line, text in wrong_lines if (at, line) == (file, here[0]))
                return f"edit {file + 1}:{here[0] + 1}={slip(right, rng) if spoil else right};"
        if tested and wrong_lines and run_tests(problem, edits) != "pass.":
            file, line, right = wrong_lines[0]
            return f"edit {file + 1}:{line + 1}={right};"
        return "test;" if changed and not skip and actions[-1] != "test;" else "submit;"


def slip(text: str, rng: random.Random) -> str:
    """A line with one operator of its body exchanged."""
    at = rng.choice([i for i, character in enumerate(text) if character in "+-*"])
    return text[:at] + ("-" if text[at] == "+" else "+") + text[at + 1 :]


def plant(count: int, lines: int, kind: str, rng: random.Random) -> Problem:
    """A repository of so many files and lines, with a change of one function that was not carried through."""
    target, *others = rng.sample(range(lines), lines)
    sites = count + 1
    callers, rest = others[:sites], others[sites:]
    extra = rng.randint(1, 9)
    changed = [definition(kind, target, rng)]  # (old, new) of each line that holds the target
    for caller in callers:
        text = f"f{caller}(x)=" + rng.choice(_CALLERS).format(c="{c}", o=rng.choice("+-"), n=rng.randint(1, 9))
        old, new = forms(kind, target, "x", str(rng.randint(1, 9)), str(extra))
        changed.append((text.format(c=old), text.format(c=new)))
    if rng.random() < 0.25:
        stale = {0}
    else:
        stale = set(rng.sample(range(1, sites + 1), rng.randint(2, sites if kind == "rename" else sites - 1)))
    # (right, written) of each line. One of the target's is in every file, so that a file left out is one too few.
    rooms: list[list[tuple[str, str]]] = [[] for _ in range(count)]
    homes = [*rng.sample(range(count), count), *rng.choices(range(count), k=len(changed) - count)]
    for index, (home, (old, new)) in enumerate(zip(homes, changed, strict=True)):
        rooms[home].append((new, old if index in stale else new))
    left = [(text, text) for text in fillers(rest, rng)]
    size = -(-lines // count)
    for room in rooms:
        for _ in range(min(size - len(room), len(left))):
            room.append(left.pop())
        rng.shuffle(room)
    files = tuple(tuple(written for _, written in room) for room in rooms)
    repairs = tuple(
        (file, line, right)
        for file, room in enumerate(rooms)
        for line, (right, written) in enumerate(room)
        if right != written
    )
    names = tuple(f"f{caller}" for caller in callers)
    problem = Problem(kind, target, extra, files, repairs, names, ())
    seen = {name: [x for x in INPUTS if not same(problem, {}, name, (x,))] for name in names}
    wrong = [name for name in names if seen[name]]
    visible = [(name, rng.choice(seen[name])) for name in rng.sample(wrong, (len(wrong) + 1) // 2)]
    return dataclasses.replace(problem, visible=tuple(visible))


def fillers(numbers: Sequence[int], rng: random.Random) -> list[str]:
    """Definitions that have nothing to do with the target. They call the first alone, so that values stay small."""
    found = []
    for number in numbers:
        text = rng.choice(_FILLERS if found else _FILLERS[:2])
        found.append(f"f{number}(x)=" + text.format(o=rng.choice("+-"), n=rng.randint(1, 9), f=numbers[0]))
    return found


def definition(kind: str, target: int, rng: random.Random) -> tuple[str, str]:
    """(old, new) definition of the target."""
    body = rng.choice(_TARGETS).format(n=rng.randint(2, 5))
    old, new = forms(kind, target, "x", "y", "z")
    return f"{old}={body}", f"{new}={body}" + "+z" * (kind == "add")


def forms(kind: str, target: int, first: str, second: str, third: str) -> tuple[str, str]:
    """(old, new) form of the target with these arguments."""
    new = {
        "rename": f"g{target}({first},{second})",
        "swap": f"f{target}({second},{first})",
        "add": f"f{target}({first},{second},{third})",
    }
    return f"f{target}({first},{second})", new[kind]
