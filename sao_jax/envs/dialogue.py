"""Customer service: ask, listen, look things up, and do at the end what the user wants, with what was said long ago.

    refund. go on?ask item;hat. go on?ask name;ann. not hat now bag.ok;look up?look bag;7. name?ann;...
    prompt        action   observation ...

The user has a goal, a tool that is called at the end with the values of its slots and a number that another tool
finds. The user speaks in turns; each action is an exchange:

    go on?              ask SLOT;           the user tells the value of a slot
    sun today.          ok;                 an interjection; it may name a value that is no part of the goal
    not hat now bag.    ok;                 a change of mind about what was told
    item?               bag;                a question about what was told before: recall
    look up?            look bag;           the table's entry under the value of the goal's key slot; `7.`
    do it.              refund bag ann cash 7;      ends the attempt: the goal's slots in its order, then the entry

An action that does not fit is answered `what?`; a question about a slot that the goal does not have `no.`, about one
that was told `told.`, a tool that is called too early `wait.`, and the user says the last thing again. Only questions
about values are passed over when the answer is wrong. Actions are ended by `;`.

The reward comes at the end. It is the user's satisfaction: 1 if the goal was reached, else half of the share of the
last call's values that are right; less PENALTY for each question that was needless or repeated, lookup of what was
looked up last, final call that came too early, and wrong answer; at least 0. Looking up another value costs an exchange
alone.

Recall is counted by distance, the exchanges between the one in which a value was told (or changed, or found) and the
one in which it was needed, in reward parts `asked_kD` and `recalled_kD`, D being the upper end of the bucket of
distances (1 to 2, 3 to 4, 5 to 8, ...). Needed are values in answers, in `look` and in the last call. Parts are totals,
so recalled / asked over many trajectories is how memory decays (`sao_jax.report.recall`).
"""

import dataclasses
import random
from collections.abc import Sequence

from sao_jax.data.protocols import Outcome
from sao_jax.data.tokenizers import WordTokenizer
from sao_jax.envs.base import TaskFamily

SLOTS = {
    "item": ("hat", "bag", "coat", "shoe", "belt", "scarf"),
    "color": ("red", "blue", "green", "black", "white", "pink"),
    "size": ("tiny", "small", "medium", "large", "huge", "giant"),
    "city": ("rome", "oslo", "cairo", "paris", "lima", "delhi"),
    "day": ("monday", "tuesday", "thursday", "friday", "saturday", "sunday"),
    "name": ("ann", "bob", "cal", "dan", "eve", "fay"),
    "pay": ("cash", "card", "coin", "gift", "check", "wire"),
    "hour": ("noon", "dawn", "dusk", "night", "morning", "evening"),
    "gate": ("north", "south", "east", "west", "front", "back"),
}
MOST_VALUES = 6  # per slot

# Goal -> its slots; one of `turns` exchanges has the first few of them. The first slot is the key of the table.
GOALS = {
    "refund": ("item", "name", "pay", "day", "city", "size", "color"),
    "book": ("city", "day", "hour", "name", "pay", "gate", "size"),
    "send": ("name", "item", "city", "color", "gate", "day", "hour"),
}
CHATS = ("sun today", "rain again", "my dog barks", "one moment", "thanks a lot", "so busy")
ASIDES = ("my son likes {}", "my aunt had {}", "she said {}")
WORDS = tuple(
    dict.fromkeys(
        [
            *SLOTS,
            *(value for values in SLOTS.values() for value in values),
            *GOALS,
            *("ask", "look", "ok", "go", "on", "up", "do", "it", "now", "not", "what", "told", "no", "wait"),
            *(w for text in (*CHATS, *ASIDES) for w in text.replace("{}", "").split() if len(w) > 1),
        ]
    )
)
PENALTY = 0.1
SLACK = 4  # exchanges beyond those that are needed


@dataclasses.dataclass(frozen=True)
class Shape:
    """slots: of the goal. changes, recalls, chats: how many of each; with the questions, a lookup and the last call
    they make `turns` exchanges. asides: half of the chats name a value that is no part of the goal. max_tokens: of an
    attempt; an expert needs about three quarters of it."""

    slots: int
    changes: int
    recalls: int
    chats: int
    asides: bool
    max_tokens: int


SHAPES = {
    8: Shape(3, 1, 1, 1, False, 88),
    16: Shape(4, 2, 4, 4, True, 160),
    32: Shape(6, 4, 10, 10, True, 288),
}
DISTANCES = (2, 4, 8, 16, 32, 64)  # upper ends of the buckets; the last holds whatever is farther


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the user wants and is going to say.

    Attributes:
      goal: one of GOALS. slots: its slots.
      values: of each slot, an index; as first told.
      table: the entry under each value of the key slot.
      script: what the user says in turn: ("open",), ("chat", text), ("change", i, shift) for the i-th slot told, whose
        value moves by `shift`, ("recall", i), ("look",), and at last ("do",).
    """

    goal: str
    slots: tuple[str, ...]
    values: tuple[int, ...]
    table: tuple[int, ...]
    script: tuple[tuple, ...]


@dataclasses.dataclass
class State:
    """Where a dialogue stands after some actions.

    Attributes:
      at: place in the script. told: slots in the order in which they were told.
      values: current value of each told slot; `old` the one before, where there was a change of mind.
      since: slot (or "entry") -> exchange in which its present value was said.
      found: the key value that was looked up last, and its entry.
      faults: questions that were needless, lookups that were repeated, final calls that came early, wrong answers.
      said: the user's last sentence.
    """

    at: int = 0
    told: list[str] = dataclasses.field(default_factory=list)
    values: dict[str, str] = dataclasses.field(default_factory=dict)
    old: dict[str, str] = dataclasses.field(default_factory=dict)
    since: dict[str, int] = dataclasses.field(default_factory=dict)
    found: tuple[str, int] | None = None
    faults: int = 0
    said: str = ""


class Dialogue(TaskFamily):
    """Dialogues, and demonstrations by an expert whose memory can be made unreliable.

    Args:
      turns: exchanges that a dialogue needs: 8 (default), 16 or 32; 0 draws it anew for each instance.
      noise: share of demonstrations with a mistake.
      habit: share of the mistakes that are forgotten changes of mind: the value that was told first is used throughout.
        The others are one needless or repeated question, or one value that is mistaken wherever it is needed.
      values: of each slot, 2 to 6; with fewer there is less to tell apart.
    """

    name = "dialogue"
    stop = ";"
    tokenizer = WordTokenizer(WORDS, "0123456789a.?;")

    def __init__(self, turns: int = 8, noise: float = 0.55, habit: float = 0.6, values: int = 4):
        if turns not in (0, *SHAPES):
            raise ValueError(f"turns is {turns}; allowed: {', '.join(map(str, SHAPES))}, or 0 for all of them")
        for name, share in (("noise", noise), ("habit", habit)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; it is a share, from 0 to 1")
        if not 2 <= values <= MOST_VALUES:
            raise ValueError(f"values is {values}; allowed: 2 to {MOST_VALUES}")
        self.turns, self.noise, self.habit, self.values = turns, noise, habit, values
        longest = turns or max(SHAPES)
        self.max_tokens, self.max_turns = SHAPES[longest].max_tokens, longest + SLACK

    def sample(self, rng: random.Random) -> Problem:
        shape = SHAPES[self.turns or rng.choice(list(SHAPES))]
        goal = rng.choice(list(GOALS))
        values = tuple(rng.randrange(self.values) for _ in range(shape.slots))
        table = tuple(rng.sample(range(10), self.values))
        return Problem(goal, GOALS[goal][: shape.slots], values, table, script(shape, self.values, rng))

    def prompt(self, problem: Problem) -> str:
        return f"{problem.goal}. {start(problem).said}"

    def respond(self, problem: Problem, actions: Sequence[str]) -> Outcome:
        state = start(problem)
        for turn, action in enumerate(actions):
            outcome = advance(problem, state, action, turn)
        return outcome

    def expert(self, problem: Problem, actions: Sequence[str], rng: random.Random) -> str:
        """What the user waits for, from any state."""
        wrong, habitual = rng.random() < self.noise, rng.random() < self.habit
        kind = rng.choice(("needless", "repeated", "mistaken"))
        state = start(problem)
        for turn, action in enumerate(actions):
            advance(problem, state, action, turn)
        known = state.values | (state.old if wrong and habitual else {})
        if wrong and not habitual:
            if kind == "mistaken":
                slot, shift = rng.choice(problem.slots), rng.randrange(1, self.values)
                if slot in known:
                    known[slot] = shifted(slot, known[slot], shift, self.values)
            elif len(state.told) == 2 and not state.faults:
                others = [slot for slot in SLOTS if slot not in problem.slots]
                return f"ask {rng.choice(state.told if kind == 'repeated' else others)};"
        return wanted(problem, state, known)


def script(shape: Shape, values: int, rng: random.Random) -> tuple[tuple, ...]:
    """What the user says: begins with a question's turn, refers to what was told only after it was told.

    The value of the key slot, told first, does not change after the lookup.
    """
    events = ["open"] * (shape.slots - 1) + ["look"] + ["chat"] * shape.chats
    events += ["change"] * shape.changes + ["recall"] * shape.recalls
    rng.shuffle(events)
    while any(kind == "change" and "look" in events[:i] and "open" not in events[:i] for i, kind in enumerate(events)):
        rng.shuffle(events)  # there would be nothing but the key to change
    lookup = events.index("look")
    told, found = 1, [("open",)]
    for place, kind in enumerate(events):
        if kind == "chat":
            value = rng.choice(SLOTS[rng.choice(list(SLOTS))])
            texts = [rng.choice(CHATS), rng.choice(ASIDES).format(value)]
            found.append((kind, rng.choice(texts if shape.asides else texts[:1])))
        elif kind == "change":
            slot = rng.randrange(place > lookup, told)
            found.append((kind, slot, rng.randrange(1, values)))
        elif kind == "recall":
            found.append((kind, rng.randrange(told)))
        else:
            told += kind == "open"
            found.append((kind,))
    return (*found, ("do",))


def shifted(slot: str, value: str, shift: int, count: int) -> str:
    """Another value of a slot: `shift` further among the first `count`."""
    return SLOTS[slot][(SLOTS[slot].index(value) + shift) % count]


def start(problem: Problem) -> State:
    state = State()
    say(problem, state, 0)
    return state


def say(problem: Problem, state: State, turn: int) -> None:
    """The user says what stands at the present place of the script; a change of mind takes effect."""
    while problem.script[state.at][0] == "open" and len(state.told) == len(problem.slots):
        state.at += 1  # everything was asked before its turn
    kind, *details = problem.script[state.at]
    if kind == "chat":
        state.said = details[0] + "."
    elif kind == "change":
        slot = state.told[details[0]]
        old = state.values[slot]
        new = shifted(slot, old, details[1], len(problem.table))
        state.said = f"not {old} now {new}."
        state.old.setdefault(slot, old)
        state.values[slot], state.since[slot] = new, turn
    elif kind == "recall":
        state.said = state.told[details[0]] + "?"
    else:
        state.said = {"open": "go on?", "look": "look up?", "do": "do it."}[kind]


def advance(problem: Problem, state: State, action: str, turn: int) -> Outcome:
    """The user's or a tool's answer to an action; `state` becomes that after it."""
    kind, *details = problem.script[state.at]
    words = action.removesuffix(";").split()
    tool = words[0] if words and action == " ".join(words) + ";" else ""
    parts: dict[str, float] = {}

    def needed(slot: str, right: bool) -> None:
        bucket = next((d for d in DISTANCES if turn - state.since[slot] <= d), DISTANCES[-1])
        for part, amount in ((f"asked_k{bucket}", 1.0), (f"recalled_k{bucket}", float(right))):
            parts[part] = parts.get(part, 0.0) + amount

    def go_on(answer: str = "") -> Outcome:
        state.at += 1
        say(problem, state, turn)
        return Outcome(f"{answer} {state.said}".strip(), parts=parts)

    def stay(answer: str, fault: bool) -> Outcome:
        state.faults += fault
        return Outcome(f"{answer} {state.said}", parts=parts)

    if tool == "ask" and len(words) == 2 and words[1] in SLOTS:
        slot = words[1]
        if slot in state.told:
            return stay("told.", True)
        if slot not in problem.slots:
            return stay("no.", True)
        value = SLOTS[slot][problem.values[problem.slots.index(slot)]]
        state.told.append(slot)
        state.values[slot], state.since[slot] = value, turn
        return go_on(value + ".") if kind == "open" else stay(value + ".", False)
    key = problem.slots[0]
    if tool == "look" and len(words) == 2 and words[1] in SLOTS[key][: len(problem.table)]:
        entry = problem.table[SLOTS[key].index(words[1])]
        again = state.found is not None and state.found[0] == words[1]
        state.found = words[1], entry
        state.since["entry"] = turn
        if kind != "look":
            return stay(f"{entry}.", again)
        if key in state.told:
            needed(key, words[1] == state.values[key])
        return go_on(f"{entry}.")
    if tool in GOALS and kind != "do":
        return stay("wait.", True)
    if tool in GOALS:
        given = words[1:]
        for index, slot in enumerate(problem.slots):
            needed(slot, given[index : index + 1] == [state.values[slot]])
        entry = str(problem.table[SLOTS[key].index(state.values[key])])
        if state.found:
            needed("entry", given[len(problem.slots) :] == [entry])
        right = [problem.goal, *(state.values[slot] for slot in problem.slots), entry]
        reached = float(words == right)
        score = 1.0 if reached else 0.5 * sum(a == b for a, b in zip(words, right, strict=False)) / len(right)
        satisfaction = max(0.0, score - PENALTY * state.faults)
        parts |= {"goal": reached, "satisfaction": satisfaction, "faults": float(state.faults)}
        return Outcome("", satisfaction, "terminated", "done", parts)
    if kind == "recall":
        slot = state.told[details[0]]
        right = action == state.values[slot] + ";"
        needed(slot, right)
        state.faults += not right
        return go_on()
    if kind in ("chat", "change") and action == "ok;":
        return go_on()
    return stay("what?", False)


def wanted(problem: Problem, state: State, known: dict[str, str]) -> str:
    """The action that suits the state, of someone who takes `known` for the values of the slots."""
    kind, *details = problem.script[state.at]
    key = problem.slots[0]
    if kind == "recall":
        return known[state.told[details[0]]] + ";"
    if kind == "look":
        return f"look {known[key]};" if key in known else f"ask {key};"
    if kind == "open":
        return f"ask {next(slot for slot in problem.slots if slot not in state.told)};"
    if kind == "do":
        if state.found is None or state.found[0] != known[key]:
            return f"look {known[key]};"
        return f"{problem.goal} {' '.join(known[slot] for slot in problem.slots)} {state.found[1]};"
    return "ok;"
