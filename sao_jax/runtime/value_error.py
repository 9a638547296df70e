"""How wrong estimates of a value are: against the mean reward of many fresh continuations of the same prefix.

    value error (%) = 100 * mean |estimate - V*| / reward range

V* is the mean over `continuations` attempts that the present policy makes from a prefix; the noise floor is what a
perfect estimate would score, since V* is a mean itself.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy as np

from sao_jax.data.trajectory import Trajectory
from sao_jax.rollout.agents import Agents
from sao_jax.runtime.evaluation import FIRST_ID

GROUP = 8  # rollouts whose mean is the group baseline


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prompt (no `snapshot`), or an attempt cut before an action, of held-out instance `index`. `tokens` is what a
    policy has read by then."""

    index: int
    tokens: np.ndarray
    snapshot: Trajectory | None = None


def cut_before_action(t: Trajectory, action: int) -> Trajectory:
    """The trajectory up to the first token of its `action`-th action (1, 2, ...), as a snapshot to go on from."""
    end = int(np.flatnonzero(t.action_mask & (t.step_ids == action))[0])
    arrays = ("tokens", "action_mask", "rollout_logp", "rewards", "version", "step_ids")
    parts = {name: getattr(t, name)[:end] for name in arrays}
    windows = tuple(window for window in t.windows if window[0] <= end)
    labels = dict(end="truncated", reason="cut before an action", reward_parts={}, windows=windows)
    return dataclasses.replace(t, **parts, **labels)


def prefixes(agents: Agents, count: int, seed: int, *, run: Callable) -> tuple[list[Prefix], list[Prefix]]:
    """`count` prompts of held-out instances, and `count` random actions in attempts at them (never the first one)."""
    rng = random.Random(seed)
    prompts, inside = [], []
    index = 0
    while len(prompts) < count or len(inside) < count:
        (attempt,) = run([(index, None)])
        first = int(np.flatnonzero(attempt.action_mask)[0])
        if len(prompts) < count:
            prompts.append(Prefix(index, attempt.tokens[:first]))
        if len(inside) < count and attempt.num_steps > 1:
            snapshot = cut_before_action(attempt, rng.randrange(1, attempt.num_steps))
            inside.append(Prefix(index, snapshot.tokens, snapshot))
        index += 1
        if index > 100 * count:
            raise ValueError(f"{index} attempts at task {agents.family.name!r} gave too few with a second action")
    return prompts, inside


def runner(agents: Agents, seed: int, check: Callable[[], None] = lambda: None) -> Callable:
    """A function that plays attempts [(index of a held-out instance, snapshot or None)] and returns their trajectories,
    in order.

    Every attempt has a rollout id of its own, hence random numbers of its own.
    """
    numbers = iter(range(FIRST_ID, 2**31 - 1))

    def play(wanted: Sequence[tuple]) -> list[Trajectory]:
        ids = [next(numbers) for _ in wanted]
        done, started = {}, 0
        while len(done) < len(ids):
            check()
            for item in agents.collect():
                if not isinstance(item, Trajectory):
                    raise ValueError(f"an attempt failed: {item.reason}")
                done[item.rollout] = item
            while started < len(ids) and agents.free > 0:
                index, snapshot = wanted[started]
                agents.start("test", index, rollout=ids[started], seed=seed, snapshot=snapshot)
                started += 1
            agents.dispatch()
        return [done[i] for i in ids]

    return play


def continuation_rewards(play: Callable, chosen: Sequence[Prefix], count: int) -> np.ndarray:
    """Rewards earned after each prefix [len(chosen), count]."""
    wanted = [(p.index, p.snapshot) for p in chosen for _ in range(count)]
    rewards = []
    for t, (_, snapshot) in zip(play(wanted), wanted, strict=True):
        rewards.append(t.total_reward - (snapshot.total_reward if snapshot is not None else 0.0))
    return np.array(rewards).reshape(len(chosen), count)


def value_errors(
    play: Callable,
    groups: dict[str, list[Prefix]],
    estimators: dict[str, Callable[[list[Prefix]], np.ndarray]],
    *,
    continuations: int,
    reward_range: float,
) -> dict[str, dict[str, float]]:
    """{kind of prefix: {estimator: value error in %, "group mean": ..., "constant": ..., "noise floor": ...}}.

    The group mean is that of `GROUP` further attempts at the same *instance*, from its prompt, as group sampling uses
    it everywhere in an attempt; "constant" is the mean of V* over the prefixes of that kind, which knows nothing of the
    prefix.
    """
    found = {}
    for kind, chosen in groups.items():
        rewards = continuation_rewards(play, chosen, continuations)
        truth = rewards.mean(axis=1)
        from_prompt = [Prefix(p.index, p.tokens) for p in chosen]
        group_means = continuation_rewards(play, from_prompt, GROUP).mean(axis=1)

        def error(estimate, truth=truth):
            return float(100 * np.mean(np.abs(estimate - truth)) / reward_range)

        floor = np.sqrt(2 / np.pi) * rewards.std(axis=1) / np.sqrt(continuations)
        found[kind] = {name: error(estimate(chosen)) for name, estimate in estimators.items()}
        found[kind] |= {
            "group mean": error(group_means),
            "constant": error(truth.mean()),
            "noise floor": float(100 * floor.mean() / reward_range),
        }
    return found
