"""Policy losses of related methods, for comparison; each returns (sum, count) like those of `policy`.

Several of them know three policies: the one that sampled (rollout, mu), a proximal one from which steps are measured,
and the current one (pi). In a learner that takes one policy step per batch the proximal policy is the current one with
its gradient stopped; the ratio pi/prox is then 1, its clipping never acts, and what is left is the weight prox/mu.
"""

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.objectives.contracts import check_band, check_positive, floats, mask_of
from sao_jax.objectives.divergences import rollout_kl
from sao_jax.objectives.policy import clipped_ratio_loss, policy_loss
from sao_jax.objectives.weights import finite_ratio, importance_weights, sequence_ratio


def cispo_loss(
    logp: ArrayLike,
    rollout_logp: ArrayLike,
    advantages: ArrayLike,
    action_mask: ArrayLike,
    *,
    low: ArrayLike,
    high: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Sum over action tokens of -stop_gradient(clip(r, low, high)) * A * logp (CISPO, MiniMax 2025).

    The policy loss with clipped importance weights, under its other name; the paper leaves the lower end at 0.
    Arrays [T] -> float32 scalars sum, count.
    """
    weights = importance_weights(logp, rollout_logp, low=low, high=high, outside="clip")
    return policy_loss(logp, weights, advantages, action_mask)


def gspo_loss(
    logp: ArrayLike,
    rollout_logp: ArrayLike,
    advantages: ArrayLike,
    action_mask: ArrayLike,
    *,
    low: ArrayLike,
    high: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """PPO's clipped surrogate with the length-normalised ratio s of the whole sequence (GSPO, Zheng et al. 2025).

        -sum_t min(s A_t, clip(s, low, high) A_t),    s = exp(mean over action tokens of log r)

    The band is around 1 and narrow, since s moves far less than a token's ratio. For one action token this is
    `clipped_ratio_loss`. Differentiable in `logp`. Arrays [T] -> float32 scalars sum, count.
    """
    check_band(low, high)
    advantages, mask = jax.lax.stop_gradient(floats(advantages)), mask_of(action_mask)
    ratio = sequence_ratio(logp, jax.lax.stop_gradient(floats(rollout_logp)), mask)
    used = mask & jnp.isfinite(floats(logp)) & jnp.isfinite(floats(rollout_logp))
    chex.assert_equal_shape([advantages, mask])
    advantages = jnp.where(used, advantages, 0.0)
    objective = jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)
    return -jnp.sum(objective), jnp.sum(mask, dtype=jnp.float32)


def decoupled_ppo_loss(
    logp: ArrayLike,
    proximal_logp: ArrayLike,
    rollout_logp: ArrayLike,
    advantages: ArrayLike,
    action_mask: ArrayLike,
    *,
    low: ArrayLike,
    high: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """-sum_t (prox/mu)_t * min(r A, clip(r, low, high) A),  r = pi/prox (Hilton et al. 2022; AReaL 2025).

    The weight prox/mu is a constant and has no band. With prox = mu this is `clipped_ratio_loss`; with prox = pi the
    policy loss under plain importance sampling. Arrays [T] -> float32 scalars sum, count.
    """
    weights, finite = finite_ratio(jax.lax.stop_gradient(proximal_logp), jax.lax.stop_gradient(rollout_logp))
    return _weighted_surrogate(logp, proximal_logp, weights, finite, advantages, action_mask, low, high)


def icepop_loss(
    logp: ArrayLike,
    proximal_logp: ArrayLike,
    rollout_logp: ArrayLike,
    advantages: ArrayLike,
    action_mask: ArrayLike,
    *,
    mask_low: ArrayLike,
    mask_high: ArrayLike,
    low: ArrayLike,
    high: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Decoupled PPO whose weight k = prox/mu is kept where mask_low <= k <= mask_high and is 0 elsewhere.

    (IcePop, Ling team 2025.) Unlike the `mask` rule the ends belong to the band. Arrays [T] -> scalars sum, count.
    """
    check_band(mask_low, mask_high)
    ratio, finite = finite_ratio(jax.lax.stop_gradient(proximal_logp), jax.lax.stop_gradient(rollout_logp))
    weights = jnp.where((ratio >= mask_low) & (ratio <= mask_high), ratio, 0.0)
    return _weighted_surrogate(logp, proximal_logp, weights, finite, advantages, action_mask, low, high)


def _weighted_surrogate(logp, proximal_logp, weights, finite, advantages, action_mask, low, high):
    mask = mask_of(action_mask)
    chex.assert_equal_shape([weights, mask])
    # The weight is not negative and so may enter by the advantage: min(rA, clip(r)A) is homogeneous in A.
    scaled = jnp.where(mask & finite, weights * jnp.where(mask, floats(advantages), 0.0), 0.0)
    return clipped_ratio_loss(logp, proximal_logp, scaled, mask, low=low, high=high)


def interpolated_logp(logp: ArrayLike, rollout_logp: ArrayLike, staleness: ArrayLike) -> jax.Array:
    """A proximal policy without a forward pass of its own: mu + a (pi - mu), a = 1 - 1/d (A-3PO 2025).

    d is the staleness in versions: fresh data (d < 1) gives pi, d = 1 gives mu, and with growing staleness the proximal
    policy approaches the current one again. Detached. logp, rollout_logp [T]; staleness [] or [T] -> float32 [T].
    """
    logp, rollout_logp = jax.lax.stop_gradient((floats(logp), floats(rollout_logp)))
    chex.assert_equal_shape([logp, rollout_logp])
    d = floats(staleness)
    a = jnp.where(d < 1.0, 1.0, 1.0 - 1.0 / jnp.maximum(d, 1.0))
    return rollout_logp + a * (logp - rollout_logp)


def sequence_mask(logp: ArrayLike, rollout_logp: ArrayLike, action_mask: ArrayLike, *, delta: ArrayLike) -> jax.Array:
    """1 if the sequence's mean k3 of KL(rollout || policy) is at most delta, else 0: a factor for all its weights.

    (Off-policy sequence masking, DeepSeek 2025, without its condition on the advantage's sign.) A sequence without a
    finite action token counts as near. logp, rollout_logp, action_mask [T] -> float32 []. ValueError unless delta > 0.
    """
    check_positive("delta", delta)
    total, count = rollout_kl(
        jax.lax.stop_gradient(floats(rollout_logp)), jax.lax.stop_gradient(floats(logp)), action_mask
    )
    return jnp.where(total <= delta * jnp.maximum(count, 1.0), 1.0, 0.0)


def beta_tracker(
    successes: ArrayLike, failures: ArrayLike, reward: ArrayLike, *, kl: ArrayLike = 0.0, half_kl: float = 0.06
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """SPO's value of a task, a decayed Beta count; the advantage is that before this reward (Xu & Ding 2025).

        A = r - a/(a + b);   a <- rho a + r,  b <- rho b + 1 - r,   rho = 2^(-KL/half_kl) in [1/2, 1]

    `kl` is how far the policy has moved since the task was last seen, in nats per token. Rewards lie in [0, 1].
    Arrays of any equal shape -> advantage, successes, failures, float32 of that shape.
    """
    a, b, r = floats(successes), floats(failures), floats(reward)
    advantage = r - a / jnp.maximum(a + b, 1e-9)
    rho = jnp.clip(jnp.exp2(-floats(kl) / half_kl), 0.5, 1.0)
    return advantage, rho * a + r, rho * b + 1.0 - r
