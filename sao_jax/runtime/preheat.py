"""Preheating: the critic is fitted to returns of the starting policy before the policy moves."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sao_jax.learner.learner import Learner
from sao_jax.runtime.loop_metrics import explained_variance

HELD_OUT = 8  # every eighth trajectory is held out
MIN_GAIN = 0.002  # a rise of explained variance below this counts as none


def fit_critic(
    learner: Learner,
    rows: Sequence[Sequence[dict[str, np.ndarray]]],
    epochs: int,
    seed: int,
    *,
    report: Callable[[int, float, float], Any],
    check: Callable[[], None],
) -> list[float]:
    """Regresses returns on the rows of trajectories until explained variance on held-out ones stops rising, at most
    `epochs` passes.

    All of the critic is trained, also what stays fixed during RL. A function of the rows, their order and the seed.
    `report(epoch, held-out explained variance, loss)` is called after each pass. Returns the explained variances,
    the one before the first pass included; fewer than `HELD_OUT` rows are all trained on, for all epochs.

    Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("there is no trajectory to preheat the critic on: every preheating rollout was dropped")
    held_out, train = rows[::HELD_OUT], [row for i, row in enumerate(rows) if i % HELD_OUT]
    if len(rows) < HELD_OUT:
        held_out, train = [], rows
    batch, was = learner.layout.batch, learner.critic_only
    learner.critic_only = True
    history = [_score(learner, held_out)]
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(train))
        losses = []
        for start in range(0, len(train), batch):
            check()
            for index in order[start : start + batch]:
                learner.put(*train[index])
            sums = learner.update()
            losses.append((sums["vf_loss"], sums["value_count"]))
        history.append(_score(learner, held_out))
        report(epoch + 1, history[-1], float(np.mean([float(loss) / float(count) for loss, count in losses])))
        if held_out and epoch and not history[-1] > max(history[:-1]) + MIN_GAIN:
            break
    learner.critic_only = was
    return history


def _score(learner: Learner, rows: Sequence[Sequence[dict]]) -> float:
    if not rows:
        return float("nan")
    return explained_variance({k: float(v) for k, v in learner.score(rows).items()})
