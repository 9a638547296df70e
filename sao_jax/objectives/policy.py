"""Policy losses. Each returns (sum, count): divide once, after accumulation and the sum over devices."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.objectives.contracts import check_band, check_choice, floats, known, mask_of
from sao_jax.objectives.weights import finite_ratio


def policy_loss(
    logp: ArrayLike,
    weights: ArrayLike,
    advantages: ArrayLike,
    action_mask: ArrayLike,
    *,
    denominator: Literal["action", "kept"] = "action",
) -> tuple[jax.Array, jax.Array]:
    """Sum over action tokens of -stop_gradient(w_t * A_t) * logp_t.

    The weight is a constant: differentiating the product w_t * A_t * logp_t would add a second term to the
    policy gradient. Descending this loss raises the log-prob of tokens with a positive advantage. A masked
    token, a token of weight 0 and a token with a non-finite log-prob contribute exactly 0 to the loss and to
    its gradient.

    Args:
      logp: [T] log-probs of the tokens under the current policy; the only input with a gradient.
      weights: [T], from `importance_weights`.
      advantages: [T].
      action_mask: [T], True where the policy sampled the token.
      denominator: what `count` counts: "action" all action tokens, "kept" those with a weight other than 0.
        Under the masking rules these are the tokens inside the band; `clip` drops none, so both agree.

    Returns:
      sum, count: float32 scalars.
    """
    check_choice("denominator", denominator, ("action", "kept"))
    logp, weights, advantages, mask = floats(logp), floats(weights), floats(advantages), mask_of(action_mask)
    chex.assert_equal_shape([logp, weights, advantages, mask])
    kept = mask & (weights != 0) & jnp.isfinite(logp)
    coefficient = jax.lax.stop_gradient(jnp.where(kept, weights, 0.0) * jnp.where(kept, advantages, 0.0))
    total = -jnp.sum(coefficient * jnp.where(kept, logp, 0.0))
    count = jnp.sum(mask if denominator == "action" else kept, dtype=jnp.float32)
    return total, count


def clipped_ratio_loss(
    logp: ArrayLike,
    old_logp: ArrayLike,
    advantages: ArrayLike,
    action_mask: ArrayLike,
    *,
    low: ArrayLike,
    high: ArrayLike,
    dual_clip: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """PPO's clipped surrogate, -min(r A, clip(r, low, high) A), summed over action tokens.

    (Schulman et al. 2017.) With `dual_clip` c the objective of a token with A < 0 is max(., c A): without it
    a large ratio makes such a token's loss unbounded (Ye et al. 2020). Tokens with A >= 0 are left alone.
    Here the gradient does flow through the ratio.

    Args:
      logp: [T] under the current policy.
      old_logp: [T] recorded when the tokens were sampled, a constant.
      advantages: [T], constants.
      action_mask: [T].
      low, high: ends of the clip range, usually 1 - eps and 1 + eps. Ends, not offsets.
      dual_clip: c > 1, or None.

    Returns:
      sum, count: float32 scalars; the count is that of all action tokens.
    """
    check_band(low, high)
    if dual_clip is not None and known(dual_clip) and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1; got {dual_clip}")
    logp, old_logp, mask = floats(logp), jax.lax.stop_gradient(floats(old_logp)), mask_of(action_mask)
    advantages = jax.lax.stop_gradient(floats(advantages))
    chex.assert_equal_shape([logp, old_logp, advantages, mask])
    ratio, finite = finite_ratio(logp, old_logp)
    used = mask & finite
    advantages = jnp.where(used, advantages, 0.0)
    objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)
    if dual_clip is not None:
        bounded = jnp.maximum(objective, dual_clip * advantages)
        objective = jnp.where(advantages < 0, bounded, objective)
    return -jnp.sum(jnp.where(used, objective, 0.0)), jnp.sum(mask, dtype=jnp.float32)
