"""Baselines from the rewards of several rollouts, for methods that sample a task more than once.

A group is a set of rows with the same id, wherever they stand; the id comes from whoever sampled, never from
the prompt.
"""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sao_jax.objectives.contracts import check_choice, floats, mask_of
from sao_jax.objectives.statistics import AxisName

Kind = Literal["grpo", "dr_grpo", "rloo", "mean"]
KINDS = ("grpo", "dr_grpo", "rloo", "mean")


def group_advantages(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    *,
    kind: Kind = "grpo",
    mask: ArrayLike | None = None,
    axis_name: AxisName = None,
) -> jax.Array:
    """Advantages of rollouts against their own group.

        grpo     (r - mean) / (population std + 1e-6)              Shao et al. 2024
        dr_grpo  r - mean                                          Liu et al. 2025
        rloo     r - mean of the others = n/(n-1) * (r - mean)     Kool et al. 2019; Ahmadian et al. 2024
        mean     r - mean; the same numbers as dr_grpo, without its name for the loss's denominator

    A group of equal rewards gives exactly 0. One id for all rows makes any kind a baseline of the whole
    batch. The number of groups need not be known and the order of rows does not matter; n rows cost n^2
    comparisons.

    A group of one has no baseline. Its advantage would be 0, so that it never trains, in silence. Called on
    concrete ids this is a ValueError; under a transformation ids cannot be read, and such a row keeps its raw
    reward.

    Args:
      rewards: any shape.
      group_ids: int, same shape.
      kind: see above.
      mask: same shape, True for rows that take part; all by default.
      axis_name: mesh axes over which groups may be spread.

    Returns:
      float32 of the same shape, 0 where masked out.
    """
    check_choice("kind", kind, KINDS)
    rewards, group_ids = floats(rewards), jnp.asarray(group_ids)
    mask = jnp.ones_like(group_ids, bool) if mask is None else mask_of(mask)
    chex.assert_type(group_ids, int)
    chex.assert_equal_shape([rewards, group_ids, mask])
    if not any(isinstance(x, jax.core.Tracer) for x in (group_ids, mask)):
        check_group_sizes(group_ids, mask)
    n, mean, square, equal = _group_moments(rewards, group_ids, mask, axis_name)
    centred = jnp.where(equal, 0.0, rewards - mean)
    if kind == "grpo":
        centred = centred / (jnp.sqrt(jnp.where(equal, 1.0, square)) + 1e-6)
    elif kind == "rloo":
        centred = centred * n / jnp.maximum(n - 1.0, 1.0)
    return jnp.where(mask, jnp.where(n > 1, centred, rewards), 0.0)


def groups_with_signal(
    rewards: ArrayLike, group_ids: ArrayLike, *, mask: ArrayLike | None = None, axis_name: AxisName = None
) -> jax.Array:
    """True for every row of a group whose rewards differ: a filter keeps or drops whole groups.

    rewards, group_ids of any equal shape -> bool of that shape.
    """
    rewards, group_ids = floats(rewards), jnp.asarray(group_ids)
    mask = jnp.ones_like(group_ids, bool) if mask is None else mask_of(mask)
    chex.assert_equal_shape([rewards, group_ids, mask])
    return mask & ~_group_moments(rewards, group_ids, mask, axis_name)[3]


def check_group_sizes(group_ids: ArrayLike, mask: ArrayLike | None = None) -> None:
    """ValueError if a group has one member: group baselines need at least two rollouts of a task. On the host."""
    ids = np.asarray(group_ids).ravel()
    if mask is not None:
        ids = ids[np.asarray(mask).ravel().astype(bool)]
    found, counts = np.unique(ids, return_counts=True)
    if (counts == 1).any():
        alone = found[counts == 1]
        raise ValueError(
            f"a group baseline needs at least 2 rollouts per group; {alone.size} of {found.size} groups have one "
            f"(first: {alone[0]}). Sample each task several times, use a critic, or give all rows one id."
        )


def _group_moments(rewards, group_ids, mask, axis_name):
    """Per row, of its group: size, mean, population variance, and whether all rewards are equal."""
    flat = rewards.ravel(), group_ids.ravel(), mask.ravel()
    others = flat if axis_name is None else jax.lax.all_gather(flat, axis_name, tiled=True)
    r, ids, valid = others
    same = (flat[1][:, None] == ids[None, :]) & valid[None, :]
    n = jnp.sum(same, axis=1, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(same, r, 0.0), axis=1) / jnp.maximum(n, 1.0)
    deviation = jnp.where(same, r[None, :] - mean[:, None], 0.0)
    variance = jnp.sum(jnp.square(deviation), axis=1) / jnp.maximum(n, 1.0)
    # Decided by comparison: rounding in the mean leaves a residue that a division by an equally tiny std blows up.
    highest = jnp.max(jnp.where(same, r, -jnp.inf), axis=1, initial=-jnp.inf)
    lowest = jnp.min(jnp.where(same, r, jnp.inf), axis=1, initial=jnp.inf)
    return tuple(x.reshape(rewards.shape) for x in (n, mean, variance, highest <= lowest))
