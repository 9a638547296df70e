"""Stored trajectories of a run, as its newest weights see them."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.data.rows import make_row, make_rows, stack_rows
from sao_jax.data.segments import SegmentReader, locations_of, read_trajectory
from sao_jax.data.storage import TrajectoryStore
from sao_jax.data.windows import windows_of
from sao_jax.learner import window
from sao_jax.models.critic import critic_outputs
from sao_jax.objectives.weights import finite_ratio
from sao_jax.runtime.devices import data_mesh
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.run import family_and_context, make_learner, read_config, restored_state


def open_segments(folder: pathlib.Path | str, rollout: int) -> SegmentReader:
    """A rollout's stored segments, one at a time and in place: of one that has ended, or of what there is of another.

    Raises ValueError if nothing of it is stored.
    """
    folder = pathlib.Path(folder)
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
        location = ledger.rollout(rollout).location or ledger.segments(rollout)
    if not location:
        raise ValueError(f"nothing of rollout {rollout} is stored: its first segment is not complete")
    return SegmentReader(TrajectoryStore(folder / "trajectories"), locations_of(location))


def read_trajectories(folder: pathlib.Path | str, count: int = 8) -> list[dict[str, Any]]:
    """The last `count` trajectories that a run has trained on, oldest first.

    Each is a dict: task, reward, end, texts (of each token), and arrays over tokens: action_mask, version (of the
    weights that sampled), value and advantage (by the newest critic; without one the advantage is that of training and
    the value NaN), weight (of the newest policy by the run's rule; the plain ratio for losses that clip it inside).
    """
    folder = pathlib.Path(folder)
    config = read_config(folder)
    family, context = family_and_context(config)
    learner = make_learner(config, family, context, data_mesh(config.devices))
    with Ledger(folder / "ledger.sqlite", read_only=True) as ledger, TrajectoryStore(folder / "trajectories") as store:
        stored = [r for r in ledger.stored() if r.state == "trained"][-count:]
        given = {e.payload["rollout"]: e.payload["advantage"] for e in ledger.events(kinds=("arrive",))}
        trajectories = [read_trajectory(store, r.location) for r in stored]
    if not trajectories:
        return []
    state, _ = restored_state(folder, learner)
    common = [
        dict(
            steps_per_segment=config.segment_steps,
            lambda_=config.policy_lambda(t.num_action_tokens),
            advantage=given[t.rollout],
        )
        for t in trajectories
    ]
    rows = stack_rows([make_row(t, length=context, **c) for t, c in zip(trajectories, common, strict=True)])
    choices, numbers, model = config.choices(), config.numbers().traced(), learner.programs.config

    @jax.jit
    def forward(state, rows):
        logp, _ = window.policy_forward(model, state["policy"], rows)
        outputs = critic_outputs(model, state["critic"], rows["tokens"]) if choices.has_critic else jnp.zeros_like(logp)
        return logp, outputs

    seen = np.zeros((2, len(trajectories), context), np.float32)
    for number, (t, c) in enumerate(zip(trajectories, common, strict=True)):
        length = learner.layout.length
        cuts = windows_of(t.action_mask, t.step_ids, t.windows, length)
        logp, outputs = (np.asarray(x) for x in forward(state, stack_rows(make_rows(t, length=length, **c))))
        for place, cut in enumerate(cuts):
            (own,) = np.nonzero(cut.index >= cut.position)
            seen[0, number, cut.index[own]] = logp[place, own]
            # The value of the prefix before a token stands one place earlier.
            seen[1, number, cut.index[own] - 1] = outputs[place, own - 1]
            seen[1, number, cut.index[-1]] = outputs[place, cut.length - 1]

    @jax.jit
    def evaluate(rows, logp, outputs):
        scored = window.score(choices, numbers, state, rows, outputs, logp)
        advantage = scored.get("advantages_raw", scored["advantages"])
        if choices.policy_loss in ("dis", "tis"):
            weight = window.token_weights(choices, numbers, logp, rows["rollout_logp"], scored["advantages"])
        else:
            weight, _ = finite_ratio(logp, rows["rollout_logp"])
        return {"value": scored.get("values", jnp.full(logp.shape, jnp.nan)), "advantage": advantage, "weight": weight}

    figures = {k: np.asarray(v) for k, v in evaluate(rows, *seen).items()}
    return [
        {
            "task": t.task,
            "reward": t.total_reward,
            "end": t.end,
            "texts": [family.tokenizer.decode([int(i)]) for i in t.tokens],
            "action_mask": t.action_mask,
            "version": t.version,
            **{k: v[i, : t.length] for k, v in figures.items()},
        }
        for i, t in enumerate(trajectories)
    ]
