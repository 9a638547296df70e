"""One attempt under a budget, to be run by `lanes.play` with one lane."""

import dataclasses
import math

from sao_jax.data.protocols import Instance, TaskFamily
from sao_jax.data.trajectory import NoActionError, Trajectory
from sao_jax.rollout.agents import Failure
from sao_jax.rollout.budget import Budget, Progress
from sao_jax.rollout.episode import Episode
from sao_jax.rollout.lanes import Ask, Attempt, Draw, Judge


@dataclasses.dataclass(frozen=True)
class Budgeted:
    """An attempt and what its budget saw of it; `cut` is why the budget ended it, "" if it did not."""

    outcome: Trajectory | Failure
    progress: Progress
    cut: str


def budgeted_attempt(
    family: TaskFamily, instance: Instance, budget: Budget, *, after: Budgeted | None = None, **labels
) -> Attempt:
    """Plays an instance until its task ends it or the budget cuts it (end "truncated"); returns a Budgeted.

    after: an attempt at the instance that was cut, to be taken up where it was; else it begins with the prompt.
    """
    episode = Episode(family, instance, **labels)
    progress, why = Progress((), 0), ""

    def resume():
        return episode.resume(after.outcome)

    (beginning,) = yield Ask([(episode, resume if after else episode.begin)])
    if beginning is None:
        return Budgeted(Failure(episode.rollout, episode.attempt, episode.reason), progress, "")
    progress = after.progress if after else Progress((yield from _value(budget, episode)), 0)
    allowance = budget.allowance(progress.values[0])
    while True:
        (action,) = yield Draw([(0, episode.tokens, episode.max_new)])
        episode.feed(action.tokens, action.logp, action.version, action.done)
        yield Ask([(episode, episode.advance)])
        tokens = progress.tokens + len(action.tokens)
        if episode.end is not None:
            progress = dataclasses.replace(progress, tokens=tokens)
            break
        progress = Progress(progress.values + (yield from _value(budget, episode)), tokens)
        why = budget.verdict(progress, allowance)
        if why:
            episode.cut(why)
            break
    try:
        outcome = episode.finish()
    except NoActionError as error:
        outcome = Failure(episode.rollout, episode.attempt, str(error))
    if isinstance(outcome, Trajectory) and outcome.end == "aborted":
        outcome = Failure(episode.rollout, episode.attempt, outcome.reason)
    return Budgeted(outcome, progress, why)


def _value(budget: Budget, episode: Episode):
    if not budget.judges:
        return (math.nan,)
    (value,) = yield Judge([episode.tokens])
    return (float(value),)
