"""Smoothed target policy: a step is shortened until the policy stays near the one that sampled the data."""

from collections.abc import Callable
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.objectives.contracts import check_positive, floats

Params = TypeVar("Params")

FRACTIONS = (1.0, 0.5, 0.25, 0.125)


def smooth_update(
    old_params: Params,
    proposed_params: Params,
    kl_fn: Callable[[Params], jax.Array],
    *,
    target: ArrayLike,
    old_kl: ArrayLike | None = None,
) -> tuple[Params, jax.Array]:
    """new = old + f * (proposed - old), f the largest of {1, 1/2, 1/4, 1/8, 0} that keeps the KL in bounds.

    The bound is max(target, KL(old)): with stale data the old policy may exceed the target before any step.
    Optimizer moments stay those of the full step. At f = 1 the result is the proposal, at f = 0 the old
    parameters, bit for bit, even if the proposal is not finite; a divergence of NaN fits no bound.

    Args:
      old_params: pytree of float arrays.
      proposed_params: pytree of the same structure, shapes and types.
      kl_fn: params -> KL, a float scalar, equal on all devices. Traced once; evaluated at most 5 times.
      target: the bound epsilon, above 0.
      old_kl: KL of the old parameters where it is known, which saves one evaluation.

    Returns:
      params, fraction.
    """
    params, fraction, _, _ = smooth_update_with_kl(old_params, proposed_params, kl_fn, target=target, old_kl=old_kl)
    return params, fraction


def smooth_update_with_kl(
    old_params: Params,
    proposed_params: Params,
    kl_fn: Callable[[Params], jax.Array],
    *,
    target: ArrayLike,
    old_kl: ArrayLike | None = None,
) -> tuple[Params, jax.Array, jax.Array, jax.Array]:
    """As `smooth_update`, for a caller that logs: params, fraction, their KL, the KL of the old parameters."""
    check_positive("target", target)
    chex.assert_trees_all_equal_shapes_and_dtypes(old_params, proposed_params)
    table = jnp.asarray((0.0, *FRACTIONS), jnp.float32)

    def attempt(state):
        index, _, _, kl_zero = state
        kl = floats(kl_fn(interpolate(old_params, proposed_params, table[index])))
        chex.assert_rank(kl, 0)
        kl_zero = jnp.where(index == 0, kl, kl_zero)
        bound = jnp.where(jnp.isfinite(kl_zero), jnp.maximum(target, kl_zero), target)
        return index + 1, (index > 0) & (kl <= bound), kl, kl_zero

    def unfinished(state):
        return (state[0] < len(table)) & ~state[1]

    # Index 0 measures the old parameters; it is skipped where their KL is given.
    first = jnp.asarray(0 if old_kl is None else 1, jnp.int32)
    kl_zero = floats(0.0 if old_kl is None else old_kl)
    index, accepted, kl, kl_zero = jax.lax.while_loop(
        unfinished, attempt, (first, jnp.asarray(False), kl_zero, kl_zero)
    )
    fraction = jnp.where(accepted, table[index - 1], 0.0)
    params = interpolate(old_params, proposed_params, fraction)
    return params, fraction, jnp.where(accepted, kl, kl_zero), kl_zero


def interpolate(old_params: Params, proposed_params: Params, fraction: ArrayLike) -> Params:
    """old + fraction * (proposed - old), exact at both ends: the ends are selected, not computed."""

    def leaf(old, proposed):
        mixed = (old + fraction * (proposed - old)).astype(old.dtype)
        return jnp.where(fraction == 0, old, jnp.where(fraction == 1, proposed, mixed))

    return jax.tree.map(leaf, old_params, proposed_params)
