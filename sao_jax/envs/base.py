"""Base classes that make a new task about thirty lines.

A task subclasses `TaskFamily` and writes three methods: `sample` draws a problem, `prompt` shows it, `respond`
answers the actions so far. `respond` is a function of the problem and the actions alone, so an attempt can be
restored anywhere, checked from any thread and replayed exactly. A fourth, `expert`, gives demonstrations.

    class Echo(TaskFamily):
        name, stop, max_tokens, max_turns = "echo", ";", 16, 1
        tokenizer = CharTokenizer("ab:;")

        def sample(self, rng):
            return "".join(rng.choices("ab", k=rng.randint(1, 6)))

        def prompt(self, problem):
            return problem + ":"

        def respond(self, problem, actions):
            return Outcome(end="terminated", reward=float(actions[-1] == problem + ";"))
"""

import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any

from sao_jax.data.protocols import TURN_LIMIT, Outcome, Split, Tokenizer

_MAX_DRAWS = 10_000


@dataclasses.dataclass(frozen=True)
class Instance:
    """One problem of a family, found again by (split, index)."""

    family: str
    split: str
    index: int
    problem: Any

    @property
    def id(self) -> str:
        return f"{self.family}/{self.split}/{self.index}"


class TaskFamily:
    """A source of instances; see the module's text for what a subclass writes.

    The split of a problem is decided by a hash of its `split_key`: what has been drawn for training is no test problem,
    for any index. `test_share` of all keys belong to test problems.
    """

    name: str
    tokenizer: Tokenizer
    stop: str
    max_tokens: int
    max_turns: int
    fast: bool = True
    test_share: float = 0.2

    def sample(self, rng: random.Random) -> Any:
        """Draws a problem: plain data that JSON can hold, or a dataclass of such."""
        raise NotImplementedError

    def prompt(self, problem: Any) -> str:
        raise NotImplementedError

    def respond(self, problem: Any, actions: Sequence[str]) -> Outcome:
        """The answer to the last of `actions` (at least one). No text that a policy can write may raise."""
        raise NotImplementedError

    def split_key(self, problem: Any) -> Any:
        """What training and test problems must not share; the whole problem, unless some of it is mere presentation."""
        return problem

    def expert(self, problem: Any, actions: Sequence[str], rng: random.Random) -> str:
        """The action an expert takes after `actions`. Every call of one attempt gets `rng` in the same state."""
        raise NotImplementedError(f"task {self.name!r} has no scripted expert")

    def instance(self, split: Split, index: int) -> Instance:
        """The index-th instance of a split; the same on every machine. Raises ValueError for another split."""
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}; allowed: train, test")
        rng = random.Random(f"{self.name}/{split}/{index}")
        for _ in range(_MAX_DRAWS):
            problem = self.sample(rng)
            if self._is_test(problem) == (split == "test"):
                return Instance(self.name, split, index, problem)
        raise ValueError(f"{_MAX_DRAWS} draws of task {self.name!r} gave no {split} problem; are there too few?")

    def environment(self) -> "Environment":
        return Environment(self)

    def _is_test(self, problem: Any) -> bool:
        digest = hashlib.sha256(f"{self.name}/{canonical(self.split_key(problem))}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.test_share * 2**64


class Environment:
    """One live attempt at one instance of a `TaskFamily`; keeps the actions and nothing else."""

    def __init__(self, family: TaskFamily):
        self._family = family
        self._problem = None
        self._actions: list[str] = []
        self._over = True
        self._expert_state = None

    def reset(self, instance: Instance) -> str:
        self.restore(instance, ())
        return self._family.prompt(instance.problem)

    def restore(self, instance: Instance, actions: Sequence[str]) -> None:
        self._problem = instance.problem
        self._actions = list(actions)
        self._over = False
        self._expert_state = None

    def step(self, action: str) -> Outcome:
        """The family's response; at the turn limit the attempt is terminated with the reward it has earned."""
        if self._over:
            raise RuntimeError("the attempt is over; call reset or restore first")
        self._actions.append(action)
        outcome = self._respond()
        if outcome.end is None and len(self._actions) >= self._family.max_turns:
            outcome = dataclasses.replace(outcome, end="terminated", reason=TURN_LIMIT)
        self._over = outcome.end is not None
        return outcome

    def demonstrate(self, rng: random.Random) -> str:
        """The expert's next action. One draw from `rng` per attempt fixes what the expert is going to do in it."""
        if self._expert_state is None:
            self._expert_state = rng.getrandbits(64)
        return self._advice(random.Random(self._expert_state))

    def _respond(self) -> Outcome:
        return self._family.respond(self._problem, tuple(self._actions))

    def _advice(self, rng: random.Random) -> str:
        return self._family.expert(self._problem, tuple(self._actions), rng)


class SteppedFamily(TaskFamily):
    """A family whose attempts carry a state along, so that a step costs the same however many came before it.

    A subclass writes `begin`, `advance` and `advise` in place of `respond` and `expert`. States are values: `advance`
    returns a new one and leaves the old one alone. An attempt is restored by advancing through its actions.
    """

    def begin(self, problem: Any) -> Any:
        """The state before the first action."""
        raise NotImplementedError

    def advance(self, problem: Any, state: Any, action: str) -> tuple[Any, Outcome]:
        """The state after an action, and the answer to it. No text that a policy can write may raise."""
        raise NotImplementedError

    def advise(self, problem: Any, state: Any, turn: int, rng: random.Random) -> str:
        """The expert's action after `turn` actions. Every call of one attempt gets `rng` in the same state."""
        raise NotImplementedError(f"task {self.name!r} has no scripted expert")

    def respond(self, problem: Any, actions: Sequence[str]) -> Outcome:
        return self.advance(problem, self.replay(problem, actions[:-1]), actions[-1])[1]

    def expert(self, problem: Any, actions: Sequence[str], rng: random.Random) -> str:
        return self.advise(problem, self.replay(problem, actions), len(actions), rng)

    def replay(self, problem: Any, actions: Sequence[str]) -> Any:
        """The state after these actions."""
        state = self.begin(problem)
        for action in actions:
            state, _ = self.advance(problem, state, action)
        return state

    def environment(self) -> "SteppedEnvironment":
        return SteppedEnvironment(self)


class SteppedEnvironment(Environment):
    """One live attempt at one instance of a `SteppedFamily`."""

    def restore(self, instance: Instance, actions: Sequence[str]) -> None:
        super().restore(instance, actions)
        self._state = self._family.replay(instance.problem, actions)

    def _respond(self) -> Outcome:
        self._state, outcome = self._family.advance(self._problem, self._state, self._actions[-1])
        return outcome

    def _advice(self, rng: random.Random) -> str:
        return self._family.advise(self._problem, self._state, len(self._actions), rng)


def demonstration(family: Any, split: Split, index: int, rng: random.Random) -> list[tuple[str, bool]]:
    """An attempt played by the expert: (text, is_action) turns, prompt first. Works with any task that has one."""
    environment, instance = family.environment(), family.instance(split, index)
    turns = [(environment.reset(instance), False)]
    end = None
    while end is None:
        action = environment.demonstrate(rng)
        outcome = environment.step(action)
        turns.append((action, True))
        if outcome.observation:
            turns.append((outcome.observation, False))
        end = outcome.end
    return turns


def canonical(problem: Any) -> str:
    """A problem as text; equal problems give equal text. Raises TypeError if it is not plain data."""
    if dataclasses.is_dataclass(problem):
        problem = dataclasses.asdict(problem)
    return json.dumps(problem, sort_keys=True, separators=(",", ":"))
