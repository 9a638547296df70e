"""The critic's loss, and how good its values are."""

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.objectives.contracts import check_positive, floats, mask_of
from sao_jax.objectives.statistics import AxisName, masked_moments, masked_sum


def value_loss(
    values: ArrayLike,
    returns: ArrayLike,
    action_mask: ArrayLike,
    *,
    old_values: ArrayLike | None = None,
    clip: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum over action tokens of 1/2 (V - R)^2.

    With `old_values` and `clip` the clipped form max(1/2 (V - R)^2, 1/2 (V_clip - R)^2), V_clip = V kept
    within +-clip of the old value. All values and returns are in the same unit: normalise the stored ones as
    well, or none.

    Args:
      values: [T]; the only input with a gradient.
      returns: [T] fixed targets.
      action_mask: [T].
      old_values: [T] values when the targets were computed.
      clip: bound on the move, above 0.

    Returns:
      sum, count: float32 scalars. Masked tokens contribute exactly 0 to the loss and its gradient.

    Raises:
      ValueError: one of `old_values` and `clip` without the other.
    """
    if (old_values is None) != (clip is None):
        raise ValueError("old_values and clip belong together: give both, or neither")
    values, returns, mask = floats(values), jax.lax.stop_gradient(floats(returns)), mask_of(action_mask)
    chex.assert_equal_shape([values, returns, mask])
    values, returns = jnp.where(mask, values, 0.0), jnp.where(mask, returns, 0.0)
    losses = 0.5 * jnp.square(values - returns)
    if old_values is not None:
        check_positive("clip", clip)
        old = jax.lax.stop_gradient(floats(old_values))
        chex.assert_equal_shape([values, old])
        old = jnp.where(mask, old, 0.0)
        clipped = old + jnp.clip(values - old, -clip, clip)
        losses = jnp.maximum(losses, 0.5 * jnp.square(clipped - returns))
    return jnp.sum(jnp.where(mask, losses, 0.0)), jnp.sum(mask, dtype=jnp.float32)


def value_clip_count(
    values: ArrayLike, old_values: ArrayLike, action_mask: ArrayLike, *, clip: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """How many action tokens moved by more than `clip`, and how many there are.

    The raw move counts, not the clipped one, which never exceeds the bound.

    values, old_values, action_mask of equal shape -> float32 scalars.
    """
    check_positive("clip", clip)
    values, old, mask = floats(values), floats(old_values), mask_of(action_mask)
    chex.assert_equal_shape([values, old, mask])
    moved = mask & (jnp.abs(values - old) > clip)
    return jnp.sum(moved, dtype=jnp.float32), jnp.sum(mask, dtype=jnp.float32)


def explained_variance(
    values: ArrayLike, returns: ArrayLike, mask: ArrayLike, *, axis_name: AxisName = None
) -> jax.Array:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one, negative for a worse one.

    NaN (null in a log) where all returns are equal, or there is none: then it says nothing. Arrays of any
    equal shape.
    """
    values, returns, mask = floats(values), floats(returns), mask_of(mask)
    chex.assert_equal_shape([values, returns, mask])
    _, total, equal = masked_moments(returns, mask, axis_name=axis_name)
    _, left, _ = masked_moments(returns - values, mask, axis_name=axis_name)
    return jnp.where(equal, jnp.nan, 1.0 - left / jnp.where(equal, 1.0, total))


def value_error(
    values: ArrayLike, reference: ArrayLike, mask: ArrayLike, *, reward_range: ArrayLike, axis_name: AxisName = None
) -> jax.Array:
    """Mean absolute error of values in percent of the reward range: 100 * mean |V - V*| / reward_range.

    `reference` are values V* from many fresh continuations of the same prefixes; its own noise bounds what
    can be seen. NaN if there is no entry. Arrays of any equal shape -> float32 []. ValueError unless
    reward_range > 0.
    """
    check_positive("reward_range", reward_range)
    values, reference, mask = floats(values), floats(reference), mask_of(mask)
    chex.assert_equal_shape([values, reference, mask])
    total, count = masked_sum(jnp.abs(values - reference), mask, axis_name=axis_name)
    return jnp.where(count > 0, 100.0 * total / jnp.maximum(count, 1.0) / reward_range, jnp.nan)
