"""Evaluations in which the critic has a say: which action is taken, how long an attempt goes on.

Both are compared with plain sampling at equal sampled tokens; the tokens of candidates and attempts that were not kept
count. No reward is looked at before an attempt has been chosen.
"""

import dataclasses
import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sao_jax.data.protocols import Instance, TaskFamily
from sao_jax.data.trajectory import Trajectory
from sao_jax.report.intervals import mean_interval, wilson
from sao_jax.rollout.agents import Failure
from sao_jax.rollout.budget import Budget, Cut, FixedBudget
from sao_jax.rollout.budgeted import Budgeted, budgeted_attempt
from sao_jax.rollout.engine import Engine
from sao_jax.rollout.guided import Search, guided_attempt, valued_prefix
from sao_jax.rollout.lanes import Attempt, Drawn, Played, play, slow_calls
from sao_jax.rollout.values import PrefixValues
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.evaluation import FIRST_ID, SUCCESS
from sao_jax.runtime.run import restored_engine


def _nothing(*_) -> None:
    pass


@dataclasses.dataclass
class Guide:
    """A run's sampler and critic. Attempts have ids of their own, hence random numbers of their own, in the order of
    the calls."""

    engine: Engine
    family: TaskFamily
    values: PrefixValues
    config: RunConfig
    context: int
    check: Callable[[], None] = _nothing
    stage: Callable[[str, int], None] = _nothing  # told what begins, and how many attempts it has
    report: Callable[[int], None] = _nothing  # told how many of them are over
    _next_id: int = FIRST_ID

    def __post_init__(self):
        config = self.config
        self._calls = None if self.family.fast else slow_calls(config.env_workers, config.env_timeout)

    @property
    def stop_ids(self) -> set[int]:
        return {self.family.tokenizer.encode(character)[0] for character in self.family.stop}

    def run(self, tasks: Sequence[int], make: Callable, *, what: str = "attempts", width: int = 1) -> list[Played]:
        """One attempt at each held-out instance; `make(task, family, instance, **labels of the episode)` makes it.

        Attempts that fail are made again, up to the run's `max_attempts`: that says nothing about the policy.
        """
        found: dict[int, Played] = {}
        todo = list(range(len(tasks)))
        for number in range(self.config.max_attempts if todo else 0):
            self.stage(what, len(todo))
            attempts = []
            for place in todo:
                first, self._next_id = self._next_id, self._next_id + width
                own = dict(rollout=first, attempt=number, seed=self.config.seed, context=self.context)
                own |= dict(temperature=self.config.temperature, limit_bootstrap=self.config.limit_bootstrap)
                instance = self.family.instance("test", tasks[place])
                attempts.append((first, make(tasks[place], self.family, instance, **own)))
            played = play(self.engine, attempts, width=width, temperature=self.config.temperature, value=self.values,
                          calls=self._calls, check=self.check, report=self.report)  # fmt: skip
            for place, now in zip(todo, played, strict=True):
                before = found[place].sampled if place in found else 0
                found[place] = Played(now.result, before + now.sampled)
            todo = [place for place in todo if _failed(found[place].result)]
            if not todo:
                break
        return [found[place] for place in range(len(tasks))]


def restored_guide(config: RunConfig, folder: pathlib.Path) -> tuple[Guide, int]:
    """The newest policy and critic of a run, and their version.

    Raises ValueError for a run without a critic, one that samples greedily, and one whose context is cut.
    """
    if not config.has_critic:
        raise ValueError(f"{folder} has no critic (--baseline {config.baseline}), so there are no values to go by")
    if config.temperature == 0:
        raise ValueError("the run samples greedily (--temperature 0), so there is nothing to choose from")
    if config.context_window is not None:
        raise ValueError(f"{folder} samples in windows (--context-window {config.context_window}); the critic ranks "
                         "attempts and candidates that are read whole")  # fmt: skip
    engine, family, context, state, version = restored_engine(config, folder)
    values = PrefixValues(engine.config, state["critic"], context=context)
    return Guide(engine, family, values, config, context), version


@dataclasses.dataclass(frozen=True)
class Comparison:
    """`figures` for a line of JSON, and the trajectories that were chosen, by instance."""

    figures: dict[str, Any]
    trajectories: list[Trajectory]


def guided_evaluation(guide: Guide, count: int, search: Search) -> Comparison:
    """Value-guided attempts at the first `count` held-out instances, and plain ones that sample as many tokens.

    Plain attempts are made in rounds over all instances until the tokens are spent. They count in three ways: `plain`,
    the share of them that succeed, since whoever samples one of k attempts has that chance; `plain_ranked`, the attempt
    of each instance whose last action the critic values most; `plain_any`, whether one of an instance's attempts
    succeeds, which only a verifier could tell.
    """

    def guided(task, family, instance, **labels):
        return guided_attempt(family, instance, search, **labels)

    played = guide.run(range(count), guided, what="guided", width=search.width)
    _require_one(played)
    spent = sum(p.sampled for p in played)
    solved = sum(_reward(p.result) >= SUCCESS for p in played)
    rounds: list[list[Played]] = []
    while not rounds or sum(p.sampled for p in itertools.chain(*rounds)) < spent:
        left = spent - sum(p.sampled for p in itertools.chain(*rounds))
        cost = statistics.fmean(p.sampled for p in itertools.chain(*rounds)) if rounds else 0.0
        tasks = range(count if not rounds else min(count, max(1, round(left / max(cost, 1.0)))))
        rounds.append(guide.run(tasks, plain_attempt, what=f"plain {len(rounds) + 1}"))
    by_task = [[r[task] for r in rounds if task < len(r)] for task in range(count)]
    made = [p.result.outcome for p in itertools.chain(*by_task)]
    values = iter(guide.values([ending(t, guide.stop_ids) for t in made if isinstance(t, Trajectory)]).tolist())
    ranked = any_of = 0
    shares = []
    for attempts in by_task:
        wins = [_reward(p.result) >= SUCCESS for p in attempts]
        worth = [-math.inf if _failed(p.result) else next(values) for p in attempts]
        ranked += wins[int(np.argmax(worth))]
        any_of += any(wins)
        shares.append(statistics.fmean(wins))
    tokens = sum(p.sampled for p in itertools.chain(*by_task))
    won = sum(_reward(p.result) >= SUCCESS for p in itertools.chain(*by_task))
    plain = dict(zip(("success", "low", "high"), mean_interval(shares), strict=True))
    plain |= {"attempts": len(made), "sampled_tokens": tokens, "solved_per_1k_tokens": 1000 * won / tokens}
    figures = _success(solved, count) | {
        "search": search.name,
        "failed": sum(_failed(p.result) for p in played),
        "sampled_tokens": spent,
        "solved_per_1k_tokens": 1000 * solved / spent,
        "plain": plain,
        "plain_ranked": ranked / count,
        "plain_any": any_of / count,
    }
    return Comparison(figures, [p.result for p in played if isinstance(p.result, Trajectory)])


def plain_attempt(task: int, family: TaskFamily, instance: Instance, **labels) -> Attempt:
    """Sampling to the task's own end."""
    return budgeted_attempt(family, instance, FixedBudget(), **labels)


def ending(t: Trajectory, stop_ids: set[int]) -> np.ndarray:
    """The prefix whose value ranks a whole attempt: that of its last action, see `guided.valued_prefix`."""
    last = int(np.flatnonzero(t.action_mask)[-1])
    action = t.tokens[t.action_mask & (t.step_ids == t.step_ids[last])]
    done = "stop" if int(action[-1]) in stop_ids else "length"
    return valued_prefix(t.tokens[: last + 1], Drawn(action, action, action, done))


def budget_evaluation(guide: Guide, count: int, budget: Budget, fixed: FixedBudget) -> Comparison:
    """Attempts at the first `count` held-out instances under a budget that may spend what `fixed` spends on them.

    A dynamic budget cuts attempts and spends the tokens that this saves on restarts, or on going on after all, in
    rounds: every attempt of a round ends before it is decided what comes next, so nothing depends on which of them ends
    first. The answer to an instance is its latest attempt; one that was cut and left so has none. With `budget` fixed
    there is nothing to compare with.
    """

    def begun(budget: Budget):
        return lambda task, family, instance, **labels: budgeted_attempt(family, instance, budget, **labels)

    base = guide.run(range(count), begun(fixed), what="fixed")
    _require_one(base)
    granted = sum(p.sampled for p in base)
    won = sum(_reward(p.result) >= SUCCESS for p in base)
    figures = {"sampled_tokens": granted, "solved_per_1k_tokens": 1000 * won / granted}
    figures |= {"cut": sum(bool(p.result.cut) for p in base), "failed": sum(_failed(p.result) for p in base)}
    figures = _success(won, count) | figures
    if not budget.judges:
        return Comparison(figures, [o for p in base if isinstance(o := _outcome(p.result), Trajectory)])

    latest = dict(enumerate(guide.run(range(count), begun(budget), what="dynamic")))
    cuts = [task for task, p in latest.items() if p.result.cut]
    whole = [p.sampled for p in latest.values() if not p.result.cut]
    spent = sum(p.sampled for p in latest.values())
    restarts, resumed, rounds = [0] * count, set(), 1

    def taken_up(task, family, instance, **labels):  # to its end, or to what the fixed budget allows
        return budgeted_attempt(family, instance, fixed, after=latest[task].result, **labels)

    while True:
        cut = [
            _cut(task, p.result, restarts[task]) for task, p in latest.items() if p.result.cut and task not in resumed
        ]
        plan = budget.spend(cut, granted - spent, statistics.fmean(whole) if whole else granted / count)
        if not plan:
            break
        rounds += 1
        anew = sorted(task for task, what in plan.items() if what == "restart")
        on = sorted(task for task, what in plan.items() if what == "resume")
        now = dict(zip(anew, guide.run(anew, begun(budget), what="restarts"), strict=True))
        for task in anew:
            restarts[task] += 1
        cuts += [task for task in anew if now[task].result.cut]
        whole += [now[task].sampled for task in anew if not now[task].result.cut]
        now |= zip(on, guide.run(on, taken_up, what="taken up"), strict=True)
        resumed.update(on)
        latest |= now
        spent += sum(p.sampled for p in now.values())
    solved = sum(_reward(p.result) >= SUCCESS for p in latest.values())
    own = {
        "sampled_tokens": spent,
        "solved_per_1k_tokens": 1000 * solved / spent,
        "cut": len(cuts),
        "restarts": sum(restarts),
        "resumed": len(resumed),
        "unanswered": sum(bool(p.result.cut) for p in latest.values()),
        "rounds": rounds,
        "failed": sum(_failed(p.result) for p in latest.values()),
        "fixed": figures,
    }
    kept = [o for task in range(count) if isinstance(o := _outcome(latest[task].result), Trajectory)]
    return Comparison(_success(solved, count) | own, kept)


def _cut(task: int, seen: Budgeted, restarts: int) -> Cut:
    return Cut(task, seen.progress.values[0], seen.progress.values[-1], seen.progress.tokens, restarts)


def _require_one(played: Sequence[Played]) -> None:
    """Raises ValueError if every attempt failed: then it is not about the policy."""
    if all(_failed(p.result) for p in played):
        raise ValueError(f"all {len(played)} attempts failed; the last: {_outcome(played[-1].result).reason}")


def _success(solved: int, count: int) -> dict[str, float]:
    low, high = wilson(solved, count)
    return {"success": solved / count, "low": low, "high": high, "n": count}


def _outcome(result) -> Trajectory | Failure:
    return result.outcome if isinstance(result, Budgeted) else result


def _failed(result) -> bool:
    return isinstance(_outcome(result), Failure)


def _reward(result) -> float:
    outcome = _outcome(result)
    return 0.0 if isinstance(outcome, Failure) else outcome.total_reward
