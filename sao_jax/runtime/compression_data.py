"""Attempts that compression is trained and scored on: an expert's, or those that a run's policy makes."""

import dataclasses
import pathlib
import random
from collections.abc import Callable

import numpy as np

from sao_jax.data.protocols import TaskFamily
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.evaluation import evaluate
from sao_jax.runtime.run import restored_agents


@dataclasses.dataclass(frozen=True)
class Attempts:
    """Right-padded rows of a multiple of the segment: tokens int32, action mask and live bool, returns float32 [N, T].

    returns[t] = rewards of the action that token t belongs to and of all later ones.
    """

    tokens: np.ndarray
    mask: np.ndarray
    live: np.ndarray
    returns: np.ndarray

    def rows(self, chosen) -> "Attempts":
        return Attempts(*(getattr(self, f.name)[chosen] for f in dataclasses.fields(self)))

    def lengthened(self, length: int) -> "Attempts":
        more = ((0, 0), (0, length - self.tokens.shape[1]))
        return Attempts(*(np.pad(getattr(self, f.name), more) for f in dataclasses.fields(self)))


def play(family: TaskFamily, split: str, count: int, segment: int, seed: int, check: Callable[[], None]) -> Attempts:
    """The expert's attempts at the first `count` instances of a split. Raises ValueError if the task has no expert."""
    rows = []
    for index in range(count):
        check()
        environment, instance = family.environment(), family.instance(split, index)
        rng = random.Random(f"{seed}/{index}")
        tokens = family.tokenizer.encode(environment.reset(instance))
        mask, rewards = [False] * len(tokens), [0.0] * len(tokens)
        end = None
        while end is None:
            try:
                action = environment.demonstrate(rng)
            except NotImplementedError as error:
                raise ValueError(f"{error}; compression is measured on the attempts of an expert") from None
            outcome = environment.step(action)
            for text, is_action in ((action, True), (outcome.observation, False)):
                ids = family.tokenizer.encode(text)
                tokens, mask = tokens + ids, mask + [is_action] * len(ids)
                rewards += [0.0] * len(ids)
                if is_action:
                    rewards[-1] += outcome.reward
            end = outcome.end
        rows.append((tokens, mask, rewards))
    return _padded(rows, segment)


def sampled(config: RunConfig, folder: pathlib.Path, count: int, segment: int, check: Callable[[], None]) -> Attempts:
    """A run's newest policy at the first `count` held-out instances, at the run's temperature."""
    agents, _ = restored_agents(config, folder)
    found = evaluate(
        agents, count, temperature=config.temperature, seed=config.seed, max_attempts=config.max_attempts, check=check
    )
    return _padded([(t.tokens, t.action_mask, t.rewards) for t in found.trajectories], segment)


def _padded(rows: list[tuple], segment: int) -> Attempts:
    """From (tokens, action mask, rewards) of each attempt."""
    length = -(-max(len(tokens) for tokens, _, _ in rows) // segment) * segment

    def padded(values, dtype):
        out = np.zeros((len(rows), length), dtype)
        for row, of in zip(out, values, strict=True):
            row[: len(of)] = of
        return out

    tokens, mask, rewards = (
        padded(part, t) for part, t in zip(zip(*rows, strict=True), (np.int32, bool, np.float32), strict=True)
    )
    live = padded([[True] * len(r[0]) for r in rows], bool)
    return Attempts(tokens, mask, live, rewards[:, ::-1].cumsum(1)[:, ::-1])
