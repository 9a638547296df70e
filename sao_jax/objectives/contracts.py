"""Checks and conversions shared by the objectives: what a function accepts is decided at its entry."""

import numbers

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def floats(x: ArrayLike) -> jax.Array:
    """Log-probs, values and advantages are float32 everywhere, whatever the model computes in."""
    return jnp.asarray(x, jnp.float32)


def mask_of(x: ArrayLike) -> jax.Array:
    """A mask may be given as bool or as 0/1."""
    return jnp.asarray(x).astype(bool)


def known(x) -> bool:
    """Whether `x` is a plain number, so that it can be checked before anything is traced."""
    return isinstance(x, numbers.Real)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def check_positive(name: str, value) -> None:
    """Traced values cannot be checked and pass."""
    if known(value) and not value > 0:
        raise ValueError(f"{name} must be above 0; got {value}")


def check_band(low, high) -> None:
    """The band is two ends around ratio 1; offsets from 1 would keep other tokens. ValueError if it is none.

    Traced ends cannot be checked and pass.
    """
    rule = "low and high are the ends of the ratio band around 1, such as (0.7, 6.0), not offsets such as (0.2, 0.28)"
    if known(low) and not low >= 0:
        raise ValueError(f"low must be at least 0, got {low}: {rule}")
    if known(low) and known(high) and not high > low:
        raise ValueError(f"high must be above low, got ({low}, {high}): {rule}")
    if (known(low) and low > 1) or (known(high) and high < 1):
        raise ValueError(f"the band must contain 1, got ({low}, {high}): {rule}")
