"""Proofs in Coq: the same protocol as `proof`, over a real prover.

    forall A B:Prop,A&B>B&A?   intros.  H:A&B/B&A  destruct H.  H:A,H0:B/B&A  split.  ...
    prompt                     action    hypotheses/goal

An action is one tactic sentence. It is given to a `coqtop` process of the attempt's own; what coqtop refuses is
answered `!` and changes nothing. Only the tactics in `TACTICS` are passed on, without `;` and commands, so that nothing
can be admitted, declared or undone; and the reward, 1, is paid only when coqtop accepts `Qed` and finds the theorem
closed, that is without assumptions. `&`, `|` and `>` are shown for /\\, \\/ and ->, only the first goal is shown,
without its variables, and what is long ends in `~`. The theorems `addzero` (n = n + 0) and `addsucc` (S (n + m) =
n + S m) may be used. A coqtop that dies or hangs is a failure of the environment, not of the policy: `step` raises
RuntimeError.
"""

import dataclasses
import os
import random
import re
import resource
import select
import shutil
import subprocess
import time
import weakref
from collections.abc import Sequence

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.data.tokenizers import WordTokenizer
from sao_jax.envs.base import Environment, Instance, TaskFamily
from sao_jax.envs.proof import ERROR, LEVELS, LONGEST, limit

TACTICS = (
    *("intro", "intros", "split", "left", "right", "destruct", "apply", "exact", "assumption", "exfalso", "symmetry"),
    *("induction", "simpl", "rewrite", "reflexivity", "contradiction"),
)
WORDS = (*TACTICS, "in", "forall", "Prop", "nat", "False", "True", "IHn", "IHm", "IHp", "addzero", "addsucc")
CHARACTERS = "ABCDEFGHSOnmpq0123456789&|>=+*()<-,:/.?!~_'"
MISSING = "task 'coq' needs the program coqtop; on Debian: apt-get install --no-install-recommends coq"

_PRELUDE = (
    *("Set Printing Width 100000.", "Set Printing Depth 20.", "Set Silent.", 'Set Warnings "none".'),
    *("Definition addzero := plus_n_O.", "Definition addsucc := plus_n_Sm."),
)
_SENTENCE = re.compile(rf"(?:{'|'.join(TACTICS)})\b[A-Za-z0-9 ()<>-]{{0,60}}\.", re.ASCII)
_LARGE_NUMBER = re.compile("[0-9]{3}")  # written out in successors
_BY = re.compile(r"\bby\b")  # `rewrite H by admit.`: any other tactic may stand behind it
_PROMPT = re.compile(rb"<prompt>(\S+) < (\d+) \|[^|]*\| \d+ < </prompt>")
_START_S, _STEP_S, _TACTIC_S = 60, 60, 10
_MEMORY, _CPU_S, _MOST_OUTPUT = 4 << 30, 3600, 16 << 20
_GOAL_TOKENS, _HYPOTHESES_TOKENS = 20, 24  # what is longer is cut

# (statement, its proof). p, q, r are propositions, n, m, k and j numbers; k and j are drawn, {kj} is their sum.
LOGIC = (
    ("p -> q -> p", "intros assumption"),
    ("p /\\ q -> q /\\ p", "intros destruct-H split assumption assumption"),
    ("p \\/ q -> q \\/ p", "intros destruct-H right assumption left assumption"),
    ("p /\\ (p -> q) -> q", "intros destruct-H apply-H0 assumption"),
    ("(p -> q) -> (q -> r) -> p -> r", "intros apply-H0 apply-H assumption"),
    ("(p -> q) -> (q -> False) -> p -> False", "intros apply-H0 apply-H assumption"),
    ("p -> (p -> False) -> q", "intros exfalso apply-H0 assumption"),
    ("(p /\\ q -> r) -> p -> q -> r", "intros apply-H split assumption assumption"),
    ("(p -> q -> r) -> p /\\ q -> r", "intros destruct-H0 apply-H assumption assumption"),
    ("p \\/ q -> (p -> r) -> (q -> r) -> r", "intros destruct-H apply-H0 assumption apply-H1 assumption"),
    (
        "(p \\/ q -> r) -> (p -> r) /\\ (q -> r)",
        "intros split intros apply-H left assumption intros apply-H right assumption",
    ),
    (
        "p /\\ (q \\/ r) -> p /\\ q \\/ p /\\ r",
        "intros destruct-H destruct-H0 left split assumption assumption right split assumption assumption",
    ),
)
_INDUCTION = "induction-n reflexivity simpl rewrite-IHn reflexivity"
ARITHMETIC = (
    ("forall n : nat, n + 0 = n", _INDUCTION),
    ("forall n : nat, n * 1 = n", _INDUCTION),
    ("forall n : nat, n + {k} = {k} + n", _INDUCTION),
    ("forall n : nat, n * 0 = 0", "induction-n reflexivity simpl assumption"),
    ("forall n m : nat, n + S m = S (n + m)", "intros " + _INDUCTION),
    ("forall n m : nat, n + (m + {k}) = n + m + {k}", "intros " + _INDUCTION),
    ("forall n m : nat, n + m = m + n", "intros induction-n apply-addzero simpl rewrite-IHn apply-addsucc"),
    ("forall n m : nat, n = m -> n + {k} = m + {k}", "intros rewrite-H reflexivity"),
    ("forall n : nat, n = {k} -> n + {j} = {kj}", "intros rewrite-H reflexivity"),
    ("forall n m : nat, n = m + {k} -> m + {k} = n", "intros symmetry assumption"),
)


@dataclasses.dataclass(frozen=True)
class Problem:
    statement: str
    script: tuple[str, ...]  # the expert's tactics


class Coq(TaskFamily):
    """Theorems of propositional logic and of arithmetic by induction, joined to conjunctions where proofs are longer.

    Args:
      level: 1 to 7, proofs of 4-7, 8-16, 17-40, 41-100, 200-400, 800-1,200 and 2,001-2,400 tactics; 0 draws a level
        from 1 to 3 for each instance.
      steps: proofs of about this many tactics instead of a level: four fifths of it or more, at most as many (4 to
        5,000).
      noise: share of demonstrations by an expert that tries `assumption` where a hypothesis or a lemma must be used,
        and insists on it until the turns are used up.

    An attempt may take a quarter more turns than the expert needs, and at least three. Held out are theorems, not the
    same with other letters or numbers; of the 31 of level 1 these are five. Raises ValueError where coqtop
    is not installed.
    """

    name = "coq"
    stop = "."
    fast = False
    tokenizer = WordTokenizer(WORDS, CHARACTERS)

    def __init__(self, level: int = 1, steps: int = 0, noise: float = 0.55):
        if level not in (0, *LEVELS):
            raise ValueError(f"level is {level}; allowed: 1 to 7, or 0 for a mixture")
        if steps and not 4 <= steps <= LONGEST:
            raise ValueError(f"steps is {steps}; allowed: 4 to {LONGEST}, or 0 to go by the level")
        if steps and level != 1:
            raise ValueError("level has no effect with steps; give one of them")
        if not 0 <= noise <= 1:
            raise ValueError(f"noise is {noise}; it is a share, from 0 to 1")
        if shutil.which("coqtop") is None:
            raise ValueError(MISSING)
        self.noise = noise
        levels = range(level or 1, (level or 3) + 1)
        self.lengths = [(steps - steps // 5, steps)] if steps else [LEVELS[n] for n in levels]
        longest = self.lengths[-1][1]
        self.max_turns = limit(longest)
        self.max_tokens = 40 + 28 * longest + 4 * (self.max_turns - longest)

    def sample(self, rng: random.Random) -> Problem:
        low, high = rng.choice(self.lengths)
        wanted = rng.randint(low, high)
        theorems, steps = [], -1  # n theorems need n - 1 splits
        while steps < wanted:
            theorem = _theorem(rng)
            if steps + 1 + len(theorem.script) <= high:
                theorems.append(theorem)
                steps += 1 + len(theorem.script)
            elif high - steps < 4:  # nothing fits any more
                if steps >= low:
                    break
                theorems, steps = [], -1
        return _joined(theorems)

    def split_key(self, problem: Problem) -> list[str]:
        """The theorems, in no order and whatever their letters and numbers: the proof of each is the same."""
        return sorted(map(_anonymous, re.findall(r"forall (?:(?!forall ).)*", problem.statement)))

    def prompt(self, problem: Problem) -> str:
        return joined([*entries(problem.statement, _GOAL_TOKENS), "?"])

    def respond(self, problem: Problem, actions: Sequence[str]) -> Outcome:
        environment = self.environment()
        environment.restore(Instance(self.name, "train", 0, problem), actions[:-1])
        return environment.step(actions[-1])

    def advise(self, problem: Problem, accepted: int, rng: random.Random) -> str:
        """The next tactic of the script after so many accepted ones."""
        confused = rng.random() < self.noise
        tactic = problem.script[min(accepted, len(problem.script) - 1)]
        return "assumption." if confused and tactic.split()[0] in ("destruct", "apply", "rewrite") else tactic

    def environment(self) -> "CoqEnvironment":
        return CoqEnvironment(self)


def entries(text: str, most: int) -> list[str]:
    """Text of Coq in the task's vocabulary, at most `most` entries and `~`. A quote parts letters."""
    for old, new in (("/\\", "&"), ("\\/", "|"), ("->", ">"), ("...", "~")):
        text = text.replace(old, new)
    found = []
    for entry in re.findall(r"[^\W\d_]{2,}|\S", text):
        if found and all(len(e) == 1 and e.isalpha() for e in (found[-1], entry)):
            found.append("'")
        found.append(entry if entry in _VOCABULARY else "_")
    return found if len(found) <= most else [*found[:most], "~"]


def joined(found: Sequence[str]) -> str:
    return Coq.tokenizer.decode([_VOCABULARY[entry] for entry in found])


_VOCABULARY = {entry: index for index, entry in enumerate((*WORDS, *CHARACTERS), start=1)}


class CoqEnvironment(Environment):
    """One live attempt; it owns a coqtop process, and is restored by giving its actions to a new one."""

    def restore(self, instance: Instance, actions: Sequence[str]) -> None:
        super().restore(instance, actions)
        self._coqtop = Coqtop(instance.problem.statement)
        self._accepted = 0
        for action in actions:
            self._tried(action)

    def _tried(self, action: str) -> str | None:
        """The first goal after an action, "" if none is left; None if the action is refused."""
        if not is_tactic(action):
            return None
        shown = self._coqtop.tactic(action)
        self._accepted += shown is not None
        return shown

    def _respond(self) -> Outcome:
        length = len(self._problem.script)
        before = min(1.0, self._accepted / length)
        shown = self._tried(self._actions[-1])
        if shown == "":
            proved = self._coqtop.closed()
            return Outcome(
                "", float(proved), "terminated", "proved" if proved else "not closed", {"progress": 1 - before}
            )
        ended = dict(end="terminated", reason=TURN_LIMIT) if len(self._actions) >= limit(length) else {}
        parts = {"progress": min(1.0, self._accepted / length) - before}
        return Outcome(ERROR if shown is None else self._view(shown), parts=parts, **ended)

    def _view(self, shown: str) -> str:
        above, _, below = shown.partition("============================\n")
        hypotheses = re.findall(r"^  (\S[^:\n]*) : (.*)$", above, re.MULTILINE)
        listed = ",".join(f"{name}:{text}" for name, text in hypotheses if text not in ("Prop", "nat"))
        return joined([*entries(listed, _HYPOTHESES_TOKENS), "/", *entries(below.split("\n")[0], _GOAL_TOKENS)])

    def _advice(self, rng: random.Random) -> str:
        return self._family.advise(self._problem, self._accepted, rng)


def is_tactic(action: str) -> bool:
    """Whether an action is one sentence of the allowed tactics: no command, and nothing that could smuggle one in."""
    return _SENTENCE.fullmatch(action) is not None and not (_LARGE_NUMBER.search(action) or _BY.search(action))


class Coqtop:
    """A coqtop process in the proof of one theorem. Raises RuntimeError if it dies, hangs or floods."""

    def __init__(self, statement: str):
        program = shutil.which("coqtop")
        if program is None:
            raise RuntimeError(MISSING)
        self._process = subprocess.Popen(
            [program, "-q", "-emacs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        if hasattr(resource, "prlimit"):  # Linux
            for what, most in (
                (resource.RLIMIT_AS, _MEMORY),
                (resource.RLIMIT_CPU, _CPU_S),
                (resource.RLIMIT_FSIZE, 0),
            ):
                resource.prlimit(self._process.pid, what, (most, most))
        self._rest = b""
        self._read(_START_S)
        for sentence in (*_PRELUDE, f"Theorem goal : {statement}."):
            if self._say(sentence) is None:
                raise RuntimeError(f"coqtop refused {sentence[:200]!r}")

    def tactic(self, sentence: str) -> str | None:
        """The first goal after a tactic, "" if none is left; None if the tactic is refused."""
        if self._say(f"Timeout {_TACTIC_S} {sentence}") is None:
            return None
        shown = self._ask("Show 1.")  # all goals would take longer to print than the step itself
        return "" if "No such goal" in shown else shown

    def closed(self) -> bool:
        """Ends the proof: whether Qed is accepted and the theorem rests on no assumption."""
        if self._say("Qed.") is None:
            return False
        return "Closed under the global context" in self._ask("Print Assumptions goal.")

    def close(self) -> None:
        self._finalizer()

    def _say(self, sentence: str) -> str | None:
        """What is shown after a sentence that changes the state; None if it changed nothing."""
        before = self._state
        shown = self._ask(sentence)
        return None if self._state == before else shown

    def _ask(self, sentence: str) -> str:
        """What is shown after a sentence. Questions too lead to a new state."""
        try:
            self._process.stdin.write(sentence.encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RuntimeError(f"coqtop is gone: {error}") from error
        return self._read(_STEP_S)

    def _read(self, seconds: float) -> str:
        """Text up to the next prompt, which names the number of the state."""
        deadline = time.monotonic() + seconds
        while (match := _PROMPT.search(self._rest)) is None:
            left = deadline - time.monotonic()
            if left <= 0 or len(self._rest) > _MOST_OUTPUT:
                self.close()
                raise RuntimeError(
                    f"coqtop hangs: no answer in {seconds} s" if left <= 0 else "coqtop floods its output"
                )
            if select.select([self._process.stdout], [], [], left)[0]:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise RuntimeError(f"coqtop died with exit status {self._process.wait()}")
                self._rest += data
        shown = self._rest[: match.start()].decode(errors="replace")
        self._rest = self._rest[match.end() :]
        self._state = int(match[2])
        return shown


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def _theorem(rng: random.Random) -> Problem:
    return instantiated(*rng.choice(ARITHMETIC if rng.random() < 0.5 else LOGIC), rng)


def instantiated(statement: str, script: str, rng: random.Random) -> Problem:
    """A statement of one of the tables with letters and numbers of its own, and its proof."""
    if "nat" in statement:
        k, j = rng.randint(1, 3), rng.randint(1, 3)
        statement = statement.format(k=k, j=j, kj=k + j)
    else:
        letters = dict(zip("pqr", rng.sample("ABCDEF", 3), strict=True))
        used = sorted(letters[c] for c in "pqr" if c in statement)
        statement = f"forall {' '.join(used)} : Prop, {statement.translate(str.maketrans(letters))}"
    return Problem(statement, tuple(tactic.replace("-", " ") + "." for tactic in script.split()))


def _anonymous(theorem: str) -> str:
    """A theorem with letters in the order of their first use, and `#` for numbers."""
    body = theorem.split(",", 1)[1].lstrip().rstrip("()/\\ ")
    letters = {c: chr(ord("A") + n) for n, c in enumerate(dict.fromkeys(re.findall(r"\b[A-F]\b", body)))}
    return re.sub(r"\d+", "#", re.sub(r"\b[A-F]\b", lambda match: letters[match[0]], body))


def _joined(theorems: list[Problem]) -> Problem:
    if len(theorems) == 1:
        return theorems[0]
    left, right = _joined(theorems[: len(theorems) // 2]), _joined(theorems[len(theorems) // 2 :])
    return Problem(f"({left.statement}) /\\ ({right.statement})", ("split.", *left.script, *right.script))
