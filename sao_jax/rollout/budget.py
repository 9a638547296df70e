"""How long an attempt may go on, and who begins anew: decisions, as pure functions of what is known of an attempt.

    allowance = budget.allowance(value of the prompt)              before an attempt
    why = budget.verdict(progress, allowance)                      after each answered action; "": it goes on
    plan = budget.spend(cut, pool, cost)                           once all attempts have ended or were cut

An attempt that a verdict ends is truncated by us, not terminated by its task: its last value is a bootstrap. `pool` are
tokens that were granted and not used. Values are those of prefixes in which an action begins, in units of reward.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, Protocol


@dataclasses.dataclass(frozen=True)
class Allowance:
    """Of one attempt: actions, and sampled tokens. Looked at between actions, so that none is cut in the middle."""

    steps: float = math.inf
    tokens: float = math.inf


@dataclasses.dataclass(frozen=True)
class Progress:
    """Of an attempt under way. values: of the prompt, then after each answered action; tokens: sampled so far.

    A budget that does not judge sees NaN.
    """

    values: tuple[float, ...]
    tokens: int

    @property
    def steps(self) -> int:
        return len(self.values) - 1


@dataclasses.dataclass(frozen=True)
class Cut:
    """A task whose latest attempt was cut: values of its prompt and of where the attempt stands, tokens sampled in it,
    and how often the task has begun anew."""

    task: int
    prompt_value: float
    value: float
    tokens: int
    restarts: int


Plan = dict[int, Literal["resume", "restart"]]


class Budget(Protocol):
    """`judges`: whether decisions need values."""

    judges: bool

    def allowance(self, prompt_value: float) -> Allowance: ...

    def verdict(self, progress: Progress, allowance: Allowance) -> str: ...

    def spend(self, cut: Sequence[Cut], pool: float, cost: float) -> Plan: ...


@dataclasses.dataclass(frozen=True)
class FixedBudget:
    """The same allowance for every task; nobody begins anew."""

    steps: float = math.inf
    tokens: float = math.inf
    judges = False

    def __post_init__(self):
        _check_limits(self)

    def allowance(self, prompt_value: float) -> Allowance:
        return Allowance(self.steps, self.tokens)

    def verdict(self, progress: Progress, allowance: Allowance) -> str:
        return _used_up(progress, allowance)

    def spend(self, cut: Sequence[Cut], pool: float, cost: float) -> Plan:
        return {}


@dataclasses.dataclass(frozen=True)
class DynamicBudget:
    """Length follows the critic.

    steps, tokens: allowance of the hardest tasks, those of value 0.
    ease: a task of value v gets the share 1 - ease * v of it, v clipped to [0, 1]: easy tasks need less.
    drop, floor, patience: an attempt is cut once its value has been under max(floor, drop * value of the prompt) after
      each of its last `patience` actions.
    max_restarts: of one task; see `spend`.
    """

    steps: float = math.inf
    tokens: float = math.inf
    ease: float = 0.25
    drop: float = 0.5
    floor: float = 0.05
    patience: int = 1
    max_restarts: int = 2
    judges = True

    def __post_init__(self):
        _check_limits(self)
        for name, high in (("ease", 1.0), ("drop", 1.0)):
            if not 0 <= getattr(self, name) < high:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in [0, {high:g})")
        if not math.isfinite(self.floor):
            raise ValueError(f"floor is {self.floor}; it must be finite")
        for name, low in (("patience", 1), ("max_restarts", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")

    def allowance(self, prompt_value: float) -> Allowance:
        share = 1.0 - self.ease * min(max(prompt_value, 0.0), 1.0)
        return Allowance(*(x if math.isinf(x) else max(1, round(share * x)) for x in (self.steps, self.tokens)))

    def verdict(self, progress: Progress, allowance: Allowance) -> str:
        limit = max(self.floor, self.drop * progress.values[0])
        recent = progress.values[1:][-self.patience :]
        if len(recent) == self.patience and all(value < limit for value in recent):
            return f"value under {limit:.3g} after {self.patience} actions"
        return _used_up(progress, allowance)

    def spend(self, cut: Sequence[Cut], pool: float, cost: float) -> Plan:
        """What becomes of tasks whose attempts were cut: those that are not named stay without an answer.

        To resume an attempt is worth its value and takes what is missing to `cost`, the tokens of a whole attempt (but
        at least a quarter of that); to begin anew is worth the value of the prompt and takes `cost`. The pool is spent
        where a token is worth most, one step after the other: on either of them, or on a restart in place of a resume.
        """
        steps = []
        for c in cut:
            rest = max(cost - c.tokens, cost / 4)
            able = c.restarts < self.max_restarts
            if able and c.prompt_value * rest > c.value * cost:  # a restart is worth more per token than going on
                steps.append((c.prompt_value / cost, cost, c.task, "restart"))
                continue
            steps.append((c.value / rest, rest, c.task, "resume"))
            if able and cost > rest:
                steps.append(((c.prompt_value - c.value) / (cost - rest), cost - rest, c.task, "restart instead"))
        plan: Plan = {}
        for worth, tokens, task, what in sorted(steps, key=lambda step: (-step[0], step[2])):
            if worth <= 0 or tokens > pool or (what == "restart instead" and task not in plan):
                continue
            plan[task] = "resume" if what == "resume" else "restart"
            pool -= tokens
        return plan


def _used_up(progress: Progress, allowance: Allowance) -> str:
    if progress.steps >= allowance.steps:
        return f"allowance of {allowance.steps:g} actions"
    if progress.tokens >= allowance.tokens:
        return f"allowance of {allowance.tokens:g} tokens"
    return ""


def _check_limits(budget) -> None:
    for name in ("steps", "tokens"):
        if not getattr(budget, name) >= 1:
            raise ValueError(f"{name} is {getattr(budget, name)}; it must be at least 1")
