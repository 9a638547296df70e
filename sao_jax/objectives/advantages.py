"""Advantages and critic targets over action tokens: observations and padding take no part in the recursion.

Time: V_t is the value of the prefix before token t, so rewards, values and advantages of one index belong to
one token. From the last token of an action to the first of the next is one step, however many observation
tokens lie between. All three estimators are one reverse scan.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.objectives.contracts import check_choice, check_positive, floats, known, mask_of


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    action_mask: ArrayLike,
    *,
    discount: ArrayLike,
    lambda_: ArrayLike,
    bootstrap_value: ArrayLike = 0.0,
    pack_ids: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation that skips observations (Schulman et al. 2015; arXiv 2607.07508).

        A_t = delta_t + discount * lambda_ * A_n,    delta_t = reward_t + discount * V_n - V_t

    with n the next action token. After the last action token A_n = 0 and V_n = bootstrap_value: 0 if the
    trajectory terminated, the value of the prefix that includes the last stored token if it was cut. Without
    observations this is plain GAE; lambda_ 1 gives Monte-Carlo returns minus V, lambda_ 0 the one-step TD
    error. Rewards, values and whatever else stands at other tokens change nothing, NaN and infinity included,
    in the result and in its gradient.

    Several trajectories in one row, or a stream that was cut and reset, are told apart by `pack_ids`: the
    recursion stops where the id changes and nowhere else, and id 0 is padding. The bootstrap is then read at
    each pack's last action token, so `bootstrap_value` may be [T]: the value of the true successor there
    (that of the old episode, never that of the row's next token), 0 where the pack terminated.

    Args:
      rewards: [T].
      values: [T].
      action_mask: [T], True where the policy sampled the token.
      discount: scalar in [0, 1].
      lambda_: scalar in [0, 1].
      bootstrap_value: scalar, or [T] with `pack_ids`.
      pack_ids: int [T], or None for a row that holds one trajectory.

    Returns:
      advantages, returns: float32 [T], returns = advantages + values; both 0 at other than action tokens.
    """
    row = _row(rewards, values, action_mask, discount, lambda_, bootstrap_value, pack_ids)
    advantages = _trace(row, weights=None, seams=None)
    return advantages, jnp.where(row["mask"], advantages + row["values"], 0.0)


def segmented_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    action_mask: ArrayLike,
    *,
    discount: ArrayLike,
    lambda_: ArrayLike,
    segment_ids: ArrayLike,
    mode: Literal["independent", "carried"] = "independent",
    bootstrap_value: ArrayLike = 0.0,
    pack_ids: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """GAE over segments of one trajectory.

    independent: each segment is estimated on its own. The recursion is cut at the seam, and the segment's
    bootstrap is the value of the first action token of the next segment that has one (`bootstrap_value` after
    the last).

    carried: the advantage of that next action token is carried over the seam, A_t += (discount * lambda_)^n
    A_next with n the action tokens from t, itself counted, to the segment's last. The sum over all seams
    telescopes to the GAE of the whole trajectory, which is how it is computed.

    With one segment both are `gae`; with lambda_ 0 they agree for any segments.

    Args:
      segment_ids: int [T]; a seam is wherever the id changes.
      mode: independent or carried.
      Others as in `gae`.

    Returns:
      advantages, returns: as `gae`.
    """
    check_choice("mode", mode, ("independent", "carried"))
    row = _row(rewards, values, action_mask, discount, lambda_, bootstrap_value, pack_ids)
    segment_ids = jnp.asarray(segment_ids)
    chex.assert_type(segment_ids, int)
    chex.assert_equal_shape([row["mask"], segment_ids])
    advantages = _trace(row, weights=None, seams=None if mode == "carried" else _changes(segment_ids))
    return advantages, jnp.where(row["mask"], advantages + row["values"], 0.0)


def corrected_returns(
    rewards: ArrayLike,
    values: ArrayLike,
    action_mask: ArrayLike,
    weights: ArrayLike,
    *,
    discount: ArrayLike,
    lambda_: ArrayLike,
    bootstrap_value: ArrayLike = 0.0,
    pack_ids: ArrayLike | None = None,
) -> jax.Array:
    """Critic targets corrected for the policy that sampled, in the form of V-trace (Espeholt et al. 2018).

        vs_t = V_t + f_t * (reward_t + discount * V_n - V_t) + discount * lambda_ * f_t * (vs_n - V_n)

    with n the next action token and f the detached weights. f = 1 gives the lambda-return, f_t = 0 cuts the
    trace at t, which leaves vs_t = V_t. After the last action token vs_n = V_n = bootstrap_value.

    Args:
      weights: [T], from `importance_weights`; constants here. Read at action tokens only.
      Others as in `gae`.

    Returns:
      targets: float32 [T], 0 at other than action tokens.
    """
    row = _row(rewards, values, action_mask, discount, lambda_, bootstrap_value, pack_ids)
    weights = jax.lax.stop_gradient(floats(weights))
    chex.assert_equal_shape([row["mask"], weights])
    correction = _trace(row, weights=jnp.where(row["mask"], weights, 0.0), seams=None)
    return jnp.where(row["mask"], correction + row["values"], 0.0)


def length_adaptive_lambda(num_action_tokens: ArrayLike, *, alpha: ArrayLike = 1.5) -> jax.Array:
    """lambda = 1 - 1/(alpha * l), clipped to [0, 1], for a trajectory of l action tokens.

    The trace then reaches over a fixed share of the trajectory, whatever its length (VAPO, Yue et al. 2025).
    No action token gives 0.

    num_action_tokens of any shape -> float32 of that shape. ValueError unless alpha > 0.
    """
    check_positive("alpha", alpha)
    # For alpha * l <= 1 the formula is at or below 0; the maximum says the same and never divides by 0.
    return 1.0 - 1.0 / jnp.maximum(alpha * floats(num_action_tokens), 1.0)


def _changes(ids: jax.Array) -> jax.Array:
    """[T] True where the next token has another id; False at the last token."""
    return jnp.append(ids[1:] != ids[:-1], jnp.zeros(min(ids.size, 1), bool))


def _row(rewards, values, action_mask, discount, lambda_, bootstrap_value, pack_ids) -> dict[str, jax.Array | None]:
    """Checks the inputs and replaces what is not read, so that it can harm neither result nor gradient."""
    for name, x in (("discount", discount), ("lambda_", lambda_)):
        if known(x) and not 0 <= x <= 1:
            raise ValueError(f"{name} must be in [0, 1]; got {x}")
    rewards, values, mask = floats(rewards), floats(values), mask_of(action_mask)
    discount, lambda_, bootstrap = floats(discount), floats(lambda_), floats(bootstrap_value)
    chex.assert_rank([rewards, discount, lambda_], [1, 0, 0])
    chex.assert_equal_shape([rewards, values, mask])
    ends = None
    if pack_ids is None:
        chex.assert_rank(bootstrap, 0)
    else:
        pack_ids = jnp.asarray(pack_ids)
        chex.assert_type(pack_ids, int)
        chex.assert_equal_shape([mask, pack_ids])
        chex.assert_rank(bootstrap, {0, 1})
        mask = mask & (pack_ids != 0)
        bootstrap = jnp.broadcast_to(bootstrap, mask.shape)
        bootstrap = jnp.where(mask, bootstrap, 0.0)
        ends = _changes(pack_ids)
    return {
        "rewards": jnp.where(mask, rewards, 0.0),
        "values": jnp.where(mask, values, 0.0),
        "mask": mask,
        "ends": ends,
        "bootstrap": bootstrap,
        "discount": discount,
        "lambda_": lambda_,
    }


def _trace(row: dict, *, weights: jax.Array | None, seams: jax.Array | None) -> jax.Array:
    """The recursion shared by all estimators, from the last token to the first; only action tokens move it.

        x_t = w_t * (reward_t + discount * nxt - V_t + discount * lambda_ * x_n)

    `ends` separate trajectories (x_n = 0 and nxt = the bootstrap), `seams` separate segments (x_n = 0, nxt
    stays). Both may stand at an observation, so they are remembered until the next action token to the left.
    """
    mask, packed = row["mask"], row["ends"] is not None
    discount, decay = row["discount"], row["discount"] * row["lambda_"]
    # Derived from the inputs, so that under shard_map the carry varies over the devices as they do.
    zero = sum(jnp.zeros_like(x, shape=()) for x in (row["rewards"], row["values"], discount, decay, row["bootstrap"]))
    zero = zero + jnp.zeros_like(mask, shape=(), dtype=jnp.float32)
    for x in (weights, seams, row["ends"]):
        zero = zero if x is None else zero + jnp.zeros_like(x, shape=(), dtype=jnp.float32)
    true, false = zero == 0.0, zero != 0.0

    def step(carry, token):
        x_next, nxt, at_end, at_seam = carry
        reward, value, acts, weight, seam, end, bootstrap = token
        at_end = at_end if end is None else at_end | end
        at_seam = at_seam if seam is None else at_seam | seam
        successor = nxt if bootstrap is None else jnp.where(at_end, bootstrap, nxt)
        x = reward + discount * successor - value + decay * jnp.where(at_end | at_seam, 0.0, x_next)
        x = x if weight is None else weight * x
        carry = jnp.where(acts, x, x_next), jnp.where(acts, value, nxt), at_end & ~acts, at_seam & ~acts
        return carry, jnp.where(acts, x, 0.0)

    start = (zero, zero, true, false) if packed else (zero, zero + row["bootstrap"], false, false)
    tokens = (
        row["rewards"],
        row["values"],
        mask,
        weights,
        seams,
        row["ends"],
        row["bootstrap"] if packed else None,
    )
    return jax.lax.scan(step, start, tokens, reverse=True)[1]
