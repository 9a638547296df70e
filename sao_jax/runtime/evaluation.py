"""Held-out success: every test instance once, with the weights the sampler has."""

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
    """Rewards by instance, in order; an attempt whose environment failed is counted in `failed` and scores 0."""

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
    check: Callable[[], None] = lambda: None,
    other: Callable[[list], None] = lambda ended: None,
    dispatched: Callable[[dict], None] = lambda schedule: None,
    report: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Runs the first `count` test instances at `temperature` (0: greedy).

    Attempts already under way on the engine go on beside them; what they end in is given to `other`. `dispatched` gets
    the schedule of each burst. Raises ValueError if every attempt failed.
    """
    rewards: dict[int, float] = {}
    trajectories: dict[int, Trajectory] = {}
    failed, started, reason = 0, 0, ""
    while len(rewards) < count:
        check()
        elsewhere = []
        for item in agents.collect():
            index = item.rollout - FIRST_ID
            if index < 0:
                elsewhere.append(item)
            elif isinstance(item, Failure):
                failed, reason = failed + 1, item.reason
                rewards[index] = 0.0
            else:
                rewards[index], trajectories[index] = item.total_reward, item
        other(elsewhere)
        report(len(rewards))
        while started < count and agents.free > 0:
            agents.start("test", started, rollout=FIRST_ID + started, seed=seed, temperature=temperature)
            started += 1
        if agents.dispatch():
            dispatched(agents.last_schedule)
    if failed == count:
        raise ValueError(f"all {count} attempts of the evaluation failed; the last: {reason}")
    return Evaluation([rewards[i] for i in range(count)], failed, [trajectories[i] for i in sorted(trajectories)])
