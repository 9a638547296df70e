"""Divergences between policies, in nats per token, and the controllers that hold one at a target."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.objectives.contracts import check_choice, check_positive, floats, mask_of

# exp(80) = 5.5e34 is still finite in float32; beyond it k3 would overflow.
MAX_LOG_DIFFERENCE = 80.0
# A measurement that steers training must not hang on one token: it uses the tighter bound.
MEASURED_LOG_DIFFERENCE = 20.0


def kl_divergence(
    sample_logp: ArrayLike,
    target_logp: ArrayLike,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k1",
    clamp: float = MAX_LOG_DIFFERENCE,
) -> jax.Array:
    """Per-token estimates of KL(p || q) from tokens sampled from p (Schulman 2020).

    With d = log q - log p of the sampled token:

        k1 = -d            unbiased, of either sign
        k2 = d^2 / 2       biased, never negative
        k3 = expm1(d) - d  unbiased, never negative

    k3 is written with expm1: in float32 exp(d) - 1 - d loses every digit for |d| below 1e-3. d is clamped to
    +-clamp, with gradient 0 beyond, so that nothing overflows. Where a log-prob is not finite, estimate and
    gradient are 0.

    Args:
      sample_logp: [T] log-probs under p, which sampled the tokens.
      target_logp: [T] log-probs under q.
      estimator: k1, k2 or k3.
      clamp: bound on |d|.

    Returns:
      float32 [T].
    """
    check_choice("estimator", estimator, ("k1", "k2", "k3"))
    check_positive("clamp", clamp)
    p, q = floats(sample_logp), floats(target_logp)
    chex.assert_equal_shape([p, q])
    finite = jnp.isfinite(p) & jnp.isfinite(q)
    d = jnp.clip(jnp.where(finite, q, 0.0) - jnp.where(finite, p, 0.0), -clamp, clamp)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * jnp.square(d)
    # Rounding in expm1 can fall an ulp short of d, which would make a divergence negative.
    return jnp.maximum(jnp.expm1(d) - d, 0.0)


def rollout_kl(rollout_logp: ArrayLike, logp: ArrayLike, action_mask: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """KL(pi_rollout || pi) as it is measured and penalised: (sum, count) of k3 over action tokens.

    The log-prob difference is clamped to +-20. Tokens outside the weight band take part: they are where the
    policies differ most. Tokens with a non-finite log-prob leave sum and count. Differentiable in `logp`.

    rollout_logp, logp, action_mask of equal shape -> sum, count: float32 scalars.
    """
    p, q, mask = floats(rollout_logp), floats(logp), mask_of(action_mask)
    chex.assert_equal_shape([p, q, mask])
    used = mask & jnp.isfinite(p) & jnp.isfinite(q)
    kl = kl_divergence(jnp.where(used, p, 0.0), jnp.where(used, q, 0.0), estimator="k3", clamp=MEASURED_LOG_DIFFERENCE)
    return jnp.sum(kl), jnp.sum(used, dtype=jnp.float32)


def masked_log_softmax(logits: ArrayLike, mask: ArrayLike) -> jax.Array:
    """Log-softmax over the entries of the last axis that `mask` allows; -inf at the others.

    Entries that are not allowed change neither the result nor its gradient, infinite ones included: they are
    replaced before the exp. Multiply the result only after selecting, since 0 * -inf is NaN.
    """
    logits, mask = floats(logits), mask_of(mask)
    chex.assert_equal_shape([logits, mask])
    peak = jnp.max(jnp.where(mask, logits, -jnp.inf), axis=-1, keepdims=True)
    peak = jax.lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0.0))
    shifted = jnp.where(mask, logits - peak, 0.0)
    # Without an allowed entry the sum is 0; the maximum keeps the log and its gradient finite.
    total = jnp.sum(jnp.where(mask, jnp.exp(shifted), 0.0), axis=-1, keepdims=True)
    return jnp.where(mask, shifted - jnp.log(jnp.maximum(total, jnp.finfo(jnp.float32).tiny)), -jnp.inf)


def entropy(logits: ArrayLike) -> jax.Array:
    """Entropy in nats over the last axis.

    Logits of -inf are impossible outcomes and count 0 in value and gradient.

    logits [..., V] -> float32 [...].
    """
    logits = floats(logits)
    possible = logits > -jnp.inf
    logp = masked_log_softmax(logits, possible)
    logp = jnp.where(possible, logp, 0.0)
    return -jnp.sum(jnp.where(possible, jnp.exp(logp) * logp, 0.0), axis=-1)


def categorical_kl(p_logits: ArrayLike, q_logits: ArrayLike) -> jax.Array:
    """Exact KL(p || q) over the last axis, for where full distributions are at hand.

    Outcomes impossible under p count 0; one that is possible under p and not under q makes the divergence
    infinite.

    p_logits, q_logits [..., V] -> float32 [...].
    """
    p_logits, q_logits = floats(p_logits), floats(q_logits)
    chex.assert_equal_shape([p_logits, q_logits])
    possible = p_logits > -jnp.inf
    log_p = jnp.where(possible, masked_log_softmax(p_logits, possible), 0.0)
    log_q = jnp.where(possible, masked_log_softmax(q_logits, q_logits > -jnp.inf), 0.0)
    return jnp.sum(jnp.where(possible, jnp.exp(log_p) * (log_p - log_q), 0.0), axis=-1)


def update_kl_coefficient(coef: ArrayLike, kl: ArrayLike, *, target: ArrayLike, step_size: ArrayLike) -> jax.Array:
    """Dual ascent on the constraint KL <= target: coef <- max(0, coef + step_size * (kl - target)).

    A KL that is not finite leaves the coefficient alone. ValueError unless target > 0 and step_size > 0.
    """
    check_positive("target", target)
    check_positive("step_size", step_size)
    coef, kl = floats(coef), floats(kl)
    return jnp.where(jnp.isfinite(kl), jnp.maximum(coef + step_size * (kl - target), 0.0), coef)


def proportional_kl_coefficient(
    coef: ArrayLike, kl: ArrayLike, *, target: ArrayLike, horizon: ArrayLike, count: ArrayLike
) -> jax.Array:
    """The multiplicative controller of Ziegler et al. (2019).

        coef <- coef * (1 + clip(kl / target - 1, +-0.2) * count / horizon)

    `count` is how much was processed since the last call, in the unit of `horizon` (both samples, or both
    steps). ValueError unless target > 0 and horizon > 0.
    """
    check_positive("target", target)
    check_positive("horizon", horizon)
    error = jnp.clip(floats(kl) / target - 1.0, -0.2, 0.2)
    return floats(coef) * (1.0 + error * count / horizon)
