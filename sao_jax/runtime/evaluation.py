"""Held-out success: every test instance once, with the weights the sampler has."""

import collections
import dataclasses
from collections.abc import Callable

from sao_jax.data.trajectory import Trajectory
from sao_jax.rollout.agents import Agents, Failure

# Rollout ids of evaluations: far above those of training, and the same each time, so that successive evaluations of one
# run draw the same random numbers and differ by the weights alone.
FIRST_ID = 1 << 30

SUCCESS = 1.0 - 1e-6  # a reward of at least this counts as success


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Rewards by instance, in order; one whose attempts have all failed is counted in `failed` and scores 0."""

    rewards: list[float]
    failed: int
    trajectories: list[Trajectory]

    @property
    def successes(self) -> int:
        return sum(reward >= SUCCESS for reward in self.rewards)


def evaluate(
    agents: Agents,
    count: int,
    *,
    temperature: float,
    seed: int = 0,
    max_attempts: int = 3,
    version: int = 0,
    check: Callable[[], None] = lambda: None,
    other: Callable[[list], None] = lambda ended: None,
    dispatched: Callable[[dict], None] = lambda schedule: None,
    report: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Runs the first `count` test instances at `temperature` (0: greedy), each up to `max_attempts` times: a process
    that dies or an environment that fails says nothing about the policy. None begins before the sampler has the weights
    of `version`, which may still be on their way to its processes.

    Attempts already under way on the engine go on beside them; what they end in is given to `other`. `dispatched` gets
    the schedule of each burst. Raises ValueError if every instance failed.
    """
    rewards: dict[int, float] = {}
    trajectories: dict[int, Trajectory] = {}
    todo = collections.deque((index, 0) for index in range(count))  # and how many of its attempts have failed
    failed, reason = 0, ""
    while len(rewards) < count:
        check()
        elsewhere = []
        for item in agents.collect():
            index = item.rollout - FIRST_ID
            if index < 0:
                elsewhere.append(item)
            elif isinstance(item, Failure):
                reason = item.reason
                if item.attempt + 1 < max_attempts:
                    todo.append((index, item.attempt + 1))
                else:
                    failed, rewards[index] = failed + 1, 0.0
            else:
                rewards[index], trajectories[index] = item.total_reward, item
        other(elsewhere)
        report(len(rewards))
        while todo and agents.free > 0 and agents.version >= version:
            index, attempt = todo.popleft()
            agents.start("test", index, rollout=FIRST_ID + index, attempt=attempt, seed=seed, temperature=temperature)
        if agents.dispatch():
            dispatched(agents.last_schedule)
    if failed == count:
        raise ValueError(
            f"all {count} instances of the evaluation failed in {max_attempts} attempts each; the last: {reason}"
        )
    return Evaluation([rewards[i] for i in range(count)], failed, [trajectories[i] for i in sorted(trajectories)])
