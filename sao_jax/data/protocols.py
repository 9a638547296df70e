"""What a task must offer, and nothing about how it does it."""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

Split = Literal["train", "test"]

# Ends that belong to the task's limits, not to its answer. They terminate, unless limits are asked to
# bootstrap.
TURN_LIMIT = "turn limit"
TOKEN_BUDGET = "token budget"
LIMIT_REASONS = (TURN_LIMIT, TOKEN_BUDGET)


class Tokenizer(Protocol):
    """Text to ids and back. decode(encode(text)) is the text; the reverse need not hold: never relied on."""

    vocab_size: int
    pad_id: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclasses.dataclass(frozen=True)
class Outcome:
    """An environment's answer to one action.

    Attributes:
      observation: text the policy reads next.
      reward: for this action.
      end: None while the attempt goes on, else "terminated", "truncated" or "aborted".
      reason: why it ended; one of LIMIT_REASONS if a limit of the task ended it.
      parts: the reward by name.
    """

    observation: str = ""
    reward: float = 0.0
    end: str | None = None
    reason: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Instance(Protocol):
    """One problem of a family."""

    @property
    def id(self) -> str: ...


class Environment(Protocol):
    """One live attempt at one instance."""

    def reset(self, instance: Instance) -> str:
        """Starts the attempt; returns the prompt."""

    def step(self, action: str) -> Outcome:
        """Answers one action. Any text is fine; raising means that the environment failed."""

    def restore(self, instance: Instance, actions: Sequence[str]) -> None:
        """Brings the environment to the state after these actions (snapshot, or replay)."""

    def demonstrate(self, rng: random.Random) -> str:
        """Next action of a scripted expert; NotImplementedError where there is none."""


class TaskFamily(Protocol):
    """A source of instances.

    Attributes:
      name: as registered.
      tokenizer: for its prompts, actions and observations.
      stop: characters that end an action; they are sampled and belong to it.
      max_tokens: of a whole trajectory, prompt included.
      max_turns: actions in one attempt.
      fast: a step takes microseconds, so it may run on the thread that drives the sampler.
    """

    name: str
    tokenizer: Tokenizer
    stop: str
    max_tokens: int
    max_turns: int
    fast: bool

    def instance(self, split: Split, index: int) -> Instance:
        """Deterministic; no train instance equals a test instance."""

    def environment(self) -> Environment: ...
