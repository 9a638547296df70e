"""Reward shaping."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.objectives.contracts import check_positive, floats, known


def soft_length_penalty(lengths: ArrayLike, *, max_length: ArrayLike, buffer: ArrayLike) -> jax.Array:
    """Penalty for nearing the length limit: 0 up to max_length - buffer, then linear to -1 at max_length and
    beyond.

    (DAPO, Yu et al. 2025.) lengths of any shape -> float32 of that shape, never positive.
    ValueError unless 0 < buffer <= max_length.
    """
    check_positive("buffer", buffer)
    if known(buffer) and known(max_length) and buffer > max_length:
        raise ValueError(f"buffer must be at most max_length; got {buffer} and {max_length}")
    return jnp.clip((max_length - buffer - floats(lengths)) / buffer, -1.0, 0.0)
