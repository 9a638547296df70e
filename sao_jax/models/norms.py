"""RMS normalisation (Zhang and Sennrich, 2019) and the product that usually follows it."""

import jax
import jax.numpy as jnp


def normalize(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """normalize(x) * gain, computed in float32, returned in the type of x."""
    return (normalize(x, eps) * gain).astype(x.dtype)


def scaled_product(y_NxD: jax.Array, gain_D: jax.Array, weight_DxF: jax.Array, dtype) -> jax.Array:
    """(y * gain) @ weight in `dtype`; the gain goes to whichever of the two factors is smaller.

    With the many rows of a gradient call that is the weight, which saves a pass over the activations in each
    direction; with the few rows of a decoding step it is y.
    """
    if y_NxD.shape[0] < weight_DxF.shape[1]:
        return (y_NxD * gain_D).astype(dtype) @ weight_DxF.astype(dtype)
    return y_NxD.astype(dtype) @ (gain_D[:, None] * weight_DxF).astype(dtype)
