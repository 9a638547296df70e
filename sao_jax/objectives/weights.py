"""Importance weights from the log-probs recorded when a token was sampled to those of the current policy.

r_t = exp(pi_t - mu_t) with pi_t the current log-prob of the sampled token and mu_t the recorded one, both at
the temperature it was sampled with. There is no third, proximal policy. All weights are constants to a
gradient, except `sequence_ratio`.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.objectives.contracts import check_band, check_choice, check_positive, floats, mask_of

# Ratios are capped at e^20 = 4.9e8: far above any useful band, and small enough that a sum of squares over a
# batch
# stays finite in float32.
MAX_LOG_RATIO = 20.0

Outside = Literal["mask", "clip", "mask_sign"]


def band_from_offsets(eps_low: float, eps_high: float) -> tuple[float, float]:
    """The ends (1 - eps_low, 1 + eps_high) of a band given by offsets: (0.3, 5.0) -> (0.7, 6.0)."""
    return 1.0 - eps_low, 1.0 + eps_high


def finite_ratio(logp: ArrayLike, rollout_logp: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The ratio exp(logp - rollout_logp), 0 where either is not finite; and the mask of where both are.

    Differentiable in `logp`; the gradient is exactly 0 where the ratio was set to 0 or capped at e^20.
    """
    logp, rollout_logp = floats(logp), floats(rollout_logp)
    chex.assert_equal_shape([logp, rollout_logp])
    finite = jnp.isfinite(logp) & jnp.isfinite(rollout_logp)
    # Selected before the exp as well: a select after it alone leaves a NaN in the gradient.
    log_ratio = jnp.where(finite, logp, 0.0) - jnp.where(finite, rollout_logp, 0.0)
    return jnp.where(finite, jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO)), 0.0), finite


def importance_weights(
    logp: ArrayLike,
    rollout_logp: ArrayLike,
    *,
    low: ArrayLike,
    high: ArrayLike,
    outside: Outside = "mask",
    advantages: ArrayLike | None = None,
) -> jax.Array:
    """Detached token weights f(r), with a band (low, high) on the ratio r = exp(logp - rollout_logp).

        mask       r if low < r < high, else 0
        clip       min(max(r, low), high)
        mask_sign  r, but 0 where r >= high with A > 0, and where r <= low with A < 0

    `mask` drops a token outside whatever the sign of its advantage. `clip` keeps it, with the weight of the
    edge. `mask_sign` drops only tokens that the update would push further out. With low 0 and high infinite
    `mask` is plain importance sampling. A token whose log-prob is not finite on either side weighs 0 under
    every rule.

    Args:
      logp: [T] log-probs of the tokens under the current policy.
      rollout_logp: [T] log-probs recorded by the sampler.
      low: lower end of the band, 0 <= low <= 1. An end, not an offset from 1.
      high: upper end, high > low, high >= 1.
      outside: the rule for ratios outside the band.
      advantages: [T], read by `mask_sign` only.

    Returns:
      float32 [T].

    Raises:
      ValueError: ends that are no band around 1 (checked where they are plain numbers), an unknown rule, or
        `mask_sign` without advantages.
    """
    check_band(low, high)
    check_choice("outside", outside, ("mask", "clip", "mask_sign"))
    ratio, finite = finite_ratio(jax.lax.stop_gradient(logp), jax.lax.stop_gradient(rollout_logp))
    if outside == "clip":
        weights = jnp.minimum(jnp.maximum(ratio, low), high)
    elif outside == "mask":
        weights = jnp.where((ratio > low) & (ratio < high), ratio, 0.0)
    else:
        if advantages is None:
            raise ValueError("outside='mask_sign' needs advantages: the rule depends on their sign")
        sign = jax.lax.stop_gradient(floats(advantages))
        chex.assert_equal_shape([ratio, sign])
        drop = ((ratio >= high) & (sign > 0)) | ((ratio <= low) & (sign < 0))
        weights = jnp.where(drop, 0.0, ratio)
    return jnp.where(finite, weights, 0.0)


def truncated_weights(logp: ArrayLike, rollout_logp: ArrayLike, *, cap: ArrayLike) -> jax.Array:
    """Truncated importance sampling, min(r, cap), detached (Ionides 2008; rho-bar of V-trace).

    logp, rollout_logp [T] -> float32 [T]; 0 where either is not finite. ValueError unless cap > 0.
    """
    check_positive("cap", cap)
    ratio, finite = finite_ratio(jax.lax.stop_gradient(logp), jax.lax.stop_gradient(rollout_logp))
    return jnp.where(finite, jnp.minimum(ratio, cap), 0.0)


def sequence_ratio(logp: ArrayLike, rollout_logp: ArrayLike, action_mask: ArrayLike) -> jax.Array:
    """Length-normalised ratio of a whole sequence: exp(mean over action tokens of log r).

    (GSPO, Zheng et al. 2025.) Differentiable in `logp`. The mean is clamped to +-20, with gradient 0 beyond.
    Tokens with a non-finite log-prob leave the mean; a sequence without a token has ratio 0, so it
    contributes nothing.

    logp, rollout_logp, action_mask [T] -> float32 [].
    """
    logp, rollout_logp, mask = floats(logp), floats(rollout_logp), mask_of(action_mask)
    chex.assert_rank(logp, 1)
    chex.assert_equal_shape([logp, rollout_logp, mask])
    used = mask & jnp.isfinite(logp) & jnp.isfinite(rollout_logp)
    total = jnp.sum(jnp.where(used, logp, 0.0) - jnp.where(used, rollout_logp, 0.0))
    count = jnp.sum(used)
    mean = jnp.clip(total / jnp.maximum(count, 1), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.where(count > 0, jnp.exp(mean), 0.0)
