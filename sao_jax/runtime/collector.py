"""Advantages that the host knows: of a rollout against its group, its batch or the running mean.

A collector takes finished trajectories one by one and gives back those that may be trained, each with its advantage.
"""

import dataclasses

import numpy as np

from sao_jax.data.trajectory import Trajectory
from sao_jax.runtime.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Ready:
    """A trajectory that may enter a batch. `advantage` is 0 and unused where a critic gives it."""

    trajectory: Trajectory
    advantage: float = 0.0


@dataclasses.dataclass(frozen=True)
class Dropped:
    trajectory: Trajectory
    reason: str


class DeadGroupsError(ValueError):
    """Too many groups in a row had equal rewards."""


class Collector:
    """Holds trajectories until their advantage is known.

    Attributes:
      held: rollouts that wait for others.
    """

    def __init__(self, config: RunConfig):
        self._config = config
        self._groups: dict[int, list[Trajectory]] = {}
        self._lost: dict[int, int] = {}
        self._dead_in_a_row = 0
        self._count, self._mean = 0, 0.0
        self._tracked: dict[str, tuple[float, float, float]] = {}  # SPO: task -> successes, failures, drift then
        self.drift = 0.0  # nats per token that the policy has moved, summed over updates

    @property
    def held(self) -> int:
        return sum(len(members) for members in self._groups.values())

    def add(self, t: Trajectory) -> list[Ready | Dropped]:
        """Takes a finished trajectory; returns what is decided by it."""
        baseline = self._config.baseline
        if baseline == "critic":
            return [Ready(t)]
        if baseline == "running_mean":
            return [Ready(t, self._against_running_mean(t.total_reward))]
        if baseline in ("batch_mean", "spo"):
            members = self._groups.setdefault(0, [])
            members.append(t)
            if len(members) < self._config.batch_size:
                return []
            return self._release(self._groups.pop(0), baseline)
        self._groups.setdefault(t.group, []).append(t)
        return self._complete(t.group)

    def prime(self, task: str, reward: float) -> None:
        """Takes a reward into the running mean, or the count of its task, that led to an advantage before a resume.

        Counts then differ from the uninterrupted ones by the order within a batch alone.
        """
        if self._config.baseline == "spo":
            self._against_task(task, reward)
        else:
            self._against_running_mean(reward)

    def lose(self, group: int) -> list[Ready | Dropped]:
        """A rollout of the group was dropped; the rest no longer waits for it."""
        if not self._config.grouped:
            return []
        self._lost[group] = self._lost.get(group, 0) + 1
        return self._complete(group)

    def flush(self) -> list[Ready | Dropped]:
        """At the end of the data: what is still held is decided as it stands."""
        kind = self._config.baseline
        decided = []
        for group in list(self._groups):
            decided += self._decide(self._groups.pop(group), kind)
        return decided

    # ---- inner parts

    def _complete(self, group: int) -> list[Ready | Dropped]:
        members = self._groups.get(group, [])
        if len(members) + self._lost.get(group, 0) < self._config.n_samples_per_prompt:
            return []
        self._lost.pop(group, None)
        return self._decide(self._groups.pop(group, []), self._config.baseline)

    def _decide(self, members: list[Trajectory], kind: str) -> list[Ready | Dropped]:
        if not members:
            return []
        if len(members) < 2:
            return [Dropped(members[0], "group of one")]
        rewards = [t.total_reward for t in members]
        if self._config.grouped and self._config.drop_dead_groups and max(rewards) == min(rewards):
            self._dead_in_a_row += 1
            if self._dead_in_a_row > self._config.max_dead_groups:
                raise DeadGroupsError(
                    f"{self._dead_in_a_row} groups in a row had equal rewards (last: {rewards[0]:g}) and were dropped; "
                    "the task is too hard or too easy for group advantages (--max-dead-groups, --drop-dead-groups)"
                )
            return [Dropped(t, "dead group") for t in members]
        self._dead_in_a_row = 0
        return self._release(members, kind)

    def _release(self, members: list[Trajectory], kind: str) -> list[Ready]:
        """Members of one group in a fixed order, whatever order they finished in."""
        members = sorted(members, key=lambda t: t.rollout)
        if kind == "spo":
            advantages = standardised(np.array([self._against_task(t.task, t.total_reward) for t in members]))
        else:
            advantages = group_advantages_on_host(np.array([t.total_reward for t in members]), kind)
        return [Ready(t, float(a)) for t, a in zip(members, advantages, strict=True)]

    def _against_task(self, task: str, reward: float) -> float:
        """SPO's tracker, see `sao_jax.objectives.neighbours.beta_tracker`; a task begins at one success of two."""
        a, b, then = self._tracked.get(task, (1.0, 1.0, self.drift))
        rho = min(1.0, max(0.5, 2.0 ** (-(self.drift - then) / 0.06)))
        self._tracked[task] = (rho * a + reward, rho * b + 1.0 - reward, self.drift)
        return reward - a / (a + b)

    def _against_running_mean(self, reward: float) -> float:
        """r - mean of the rewards before it (an exponential mean over about 1000, a plain one until then)."""
        advantage = reward - self._mean if self._count else 0.0
        self._count += 1
        self._mean += (reward - self._mean) / min(self._count, 1000)
        return advantage


def standardised(x: np.ndarray) -> np.ndarray:
    """(x - mean) / population std, 0 where all are equal."""
    return (x - x.mean()) / (x.std() + 1e-8) if x.max() > x.min() else np.zeros_like(x)


def group_advantages_on_host(rewards: np.ndarray, kind: str) -> np.ndarray:
    """`sao.group_advantages` for one group, on the host: a few numbers are not worth a device program."""
    centred = rewards - rewards.mean()
    if rewards.max() == rewards.min():
        return np.zeros_like(centred)
    if kind == "grpo":
        return centred / (rewards.std() + 1e-6)
    if kind == "rloo":
        return centred * len(rewards) / (len(rewards) - 1)
    return centred
