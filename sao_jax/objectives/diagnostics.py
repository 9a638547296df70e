"""What an update reports about its data, as sums that add up over micro-batches and devices."""

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.objectives.contracts import check_band, floats, mask_of
from sao_jax.objectives.divergences import rollout_kl
from sao_jax.objectives.weights import finite_ratio


def band_counts(
    logp: ArrayLike,
    rollout_logp: ArrayLike,
    advantages: ArrayLike,
    action_mask: ArrayLike,
    *,
    low: ArrayLike,
    high: ArrayLike,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Action tokens on either side of the band by the sign of their advantage, and the number of them all.

    low: r <= low; high: r >= high, as the rules of `importance_weights` have it. `low` and `high` count every
    sign; `low_pos`, `low_neg`, `high_pos`, `high_neg` those with A > 0 and A < 0 (A = 0 moves nothing and is
    in neither). `nonfinite` counts tokens with a non-finite log-prob, which are in none of the others.

    Arrays of any equal shape -> dict of float32 scalars, float32 count.
    """
    check_band(low, high)
    advantages, mask = floats(advantages), mask_of(action_mask)
    ratio, finite = finite_ratio(logp, rollout_logp)
    chex.assert_equal_shape([ratio, advantages, mask])
    counts = {"nonfinite": mask & ~finite}
    for side, outside in (("low", ratio <= low), ("high", ratio >= high)):
        outside = outside & mask & finite
        counts |= {side: outside, f"{side}_pos": outside & (advantages > 0), f"{side}_neg": outside & (advantages < 0)}
    return {name: jnp.sum(x, dtype=jnp.float32) for name, x in counts.items()}, jnp.sum(mask, dtype=jnp.float32)


def drift_sums(
    logp: ArrayLike, rollout_logp: ArrayLike, action_mask: ArrayLike
) -> tuple[dict[str, jax.Array], jax.Array]:
    """How far the policy has moved from the one that sampled: sums over the tokens used, and their count.

    Used are the action tokens whose log-probs are finite.

        ratio, ratio_sq  give the mean and the effective sample size ratio^2 / (count * ratio_sq)
        kl               k3 of KL(rollout || policy)
        logp_abs_diff    |logp - rollout_logp|, about 0 for the weights that sampled

    Arrays of any equal shape -> dict of float32 scalars, float32 count.
    """
    logp, rollout_logp, mask = floats(logp), floats(rollout_logp), mask_of(action_mask)
    ratio, finite = finite_ratio(logp, rollout_logp)
    chex.assert_equal_shape([ratio, mask])
    used = mask & finite
    difference = jnp.where(used, logp, 0.0) - jnp.where(used, rollout_logp, 0.0)
    kl, count = rollout_kl(rollout_logp, logp, mask)
    sums = {
        "ratio": jnp.sum(jnp.where(used, ratio, 0.0)),
        "ratio_sq": jnp.sum(jnp.where(used, jnp.square(ratio), 0.0)),
        "kl": kl,
        "logp_abs_diff": jnp.sum(jnp.abs(difference)),
    }
    return sums, count


def largest_ratio(logp: ArrayLike, rollout_logp: ArrayLike, action_mask: ArrayLike) -> jax.Array:
    """The largest ratio over action tokens, 0 without one. It joins over devices by pmax, not by a sum."""
    ratio, _ = finite_ratio(logp, rollout_logp)
    return jnp.max(jnp.where(mask_of(action_mask), ratio, 0.0), initial=0.0)


def scored_tokens(action_mask: ArrayLike, pack_ids: ArrayLike | None = None) -> jax.Array:
    """[T] action tokens with a predecessor to be predicted from: not the first of a row, nor of a pack.

    Without this the last token of one packed trajectory would be trained to predict the first of the next.
    Padding has pack id 0.
    """
    mask = mask_of(action_mask)
    chex.assert_rank(mask, 1)
    if pack_ids is None:
        return mask & (jnp.arange(mask.size) > 0)
    pack_ids = jnp.asarray(pack_ids)
    chex.assert_equal_shape([mask, pack_ids])
    inside = jnp.concatenate([jnp.zeros(min(mask.size, 1), bool), pack_ids[1:] == pack_ids[:-1]])
    return mask & inside & (pack_ids != 0)
