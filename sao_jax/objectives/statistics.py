"""Statistics over a whole batch of any shape, exact over devices.

`axis_name` names the mesh axes (inside `shard_map`) over which sums are taken, so that every device sees the
numbers of the whole batch; an empty shard takes part with sums of 0. Masked entries change nothing, NaN
included.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.objectives.contracts import check_choice, check_positive, floats, mask_of

AxisName = str | tuple[str, ...] | None


def masked_sum(x: ArrayLike, mask: ArrayLike, *, axis_name: AxisName = None) -> tuple[jax.Array, jax.Array]:
    """Sum of `x` where `mask`, and the number of such entries: float32 scalars."""
    x, mask = floats(x), mask_of(mask)
    chex.assert_equal_shape([x, mask])
    sums = jnp.sum(jnp.where(mask, x, 0.0)), jnp.sum(mask, dtype=jnp.float32)
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)


def masked_mean(x: ArrayLike, mask: ArrayLike, *, axis_name: AxisName = None) -> jax.Array:
    """Mean of `x` where `mask`, 0 if there is none: the sum over devices divided by the count over devices."""
    total, count = masked_sum(x, mask, axis_name=axis_name)
    return total / jnp.maximum(count, 1.0)


def masked_moments(
    x: ArrayLike, mask: ArrayLike, *, axis_name: AxisName = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, population variance and whether all values are equal (true of none and of one).

    The variance comes from a second pass and is exactly 0 for equal values: a residue of rounding in the mean
    would otherwise pass for a spread.
    """
    x, mask = floats(x), mask_of(mask)
    mean = masked_mean(x, mask, axis_name=axis_name)
    fixed = jax.lax.stop_gradient(x)  # pmax has no derivative, and none is wanted
    highest = jnp.max(jnp.where(mask, fixed, -jnp.inf), initial=-jnp.inf)
    lowest = jnp.min(jnp.where(mask, fixed, jnp.inf), initial=jnp.inf)
    if axis_name is not None:
        highest, lowest = jax.lax.pmax(highest, axis_name), jax.lax.pmin(lowest, axis_name)
    equal = highest <= lowest
    variance = masked_mean(jnp.square(jnp.where(mask, x, 0.0) - mean), mask, axis_name=axis_name)
    return mean, jnp.where(equal, 0.0, variance), equal


def whiten(x: ArrayLike, mask: ArrayLike, *, axis_name: AxisName = None, eps: float = 1e-8) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) over the masked-in entries of all devices; 0 elsewhere.

    Population variance. Equal values, and so a single one, give exactly 0.

    x, mask of equal shape -> float32 of that shape.
    """
    x, mask = floats(x), mask_of(mask)
    chex.assert_equal_shape([x, mask])
    mean, variance, equal = masked_moments(x, mask, axis_name=axis_name)
    return jnp.where(mask & ~equal, (jnp.where(mask, x, 0.0) - mean) * jax.lax.rsqrt(variance + eps), 0.0)


def effective_sample_size(log_ratio: ArrayLike, mask: ArrayLike, *, axis_name: AxisName = None) -> jax.Array:
    """Effective sample size as a share of the samples: (sum w)^2 / (n sum w^2) with w = exp(log_ratio).

    1 for equal weights, 1/n if one weight dwarfs the rest. The largest log-ratio is taken out first, which
    changes nothing but the range. A log-ratio that is not finite has weight 0 and counts in n. NaN if there
    is no sample.

    log_ratio, mask of equal shape -> float32 [].
    """
    log_ratio, mask = floats(log_ratio), mask_of(mask)
    chex.assert_equal_shape([log_ratio, mask])
    finite = mask & jnp.isfinite(log_ratio)
    peak = jnp.max(jax.lax.stop_gradient(jnp.where(finite, log_ratio, -jnp.inf)), initial=-jnp.inf)
    if axis_name is not None:
        peak = jax.lax.pmax(peak, axis_name)
    weight = jnp.exp(jnp.where(finite, log_ratio - peak, -jnp.inf))
    total, count = masked_sum(weight, mask, axis_name=axis_name)
    squares, _ = masked_sum(jnp.square(weight), mask, axis_name=axis_name)
    share = jnp.square(total) / jnp.where(squares > 0, count * squares, 1.0)
    return jnp.where(count > 0, share, jnp.nan)


def reduce_rows(
    sums: ArrayLike,
    counts: ArrayLike,
    *,
    by: Literal["token", "sequence", "constant"] = "token",
    length: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Joins the (sum, count) of several sequences into one pair, of which sum/count is the loss.

        token     every token weighs the same (default): sum of sums over sum of counts
        sequence  every sequence weighs the same: sum of means over the number of sequences that have a token
        constant  sum of sums over length * number of sequences that have a token (Dr.GRPO, Liu et al. 2025)

    Pairs of several micro-batches or devices add up; divide once, at the end.

    sums, counts [N] -> sum, count: float32 scalars.
    """
    check_choice("by", by, ("token", "sequence", "constant"))
    if (by == "constant") != (length is not None):
        raise ValueError("length belongs to by='constant', which needs it")
    sums, counts = floats(sums), floats(counts)
    chex.assert_rank(sums, 1)
    chex.assert_equal_shape([sums, counts])
    rows = jnp.sum(counts > 0, dtype=jnp.float32)
    if by == "token":
        return jnp.sum(sums), jnp.sum(counts)
    if by == "sequence":
        return jnp.sum(jnp.where(counts > 0, sums / jnp.maximum(counts, 1.0), 0.0)), rows
    check_positive("length", length)
    return jnp.sum(sums), length * rows
