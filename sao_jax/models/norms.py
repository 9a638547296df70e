"""RMS normalisation (Zhang and Sennrich, 2019) and the product that usually follows it."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def normalize(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, float32.

    The VJP saves y and r = 1 / sqrt(mean(x^2) + eps) instead of x and the chain of intermediate results:
    dx = r * (dy - y * mean(dy * y)).
    """
    return _normalize_forward(x, eps)[0]


def _normalize_forward(x, eps):
    x32 = x.astype(jnp.float32)
    r = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    # An empty array carries the type of x to the backward pass.
    return x32 * r, (x32 * r, r, jnp.zeros(0, x.dtype))


def _normalize_backward(eps, residuals, dy):
    y, r, like_x = residuals
    return ((r * (dy - y * jnp.mean(dy * y, axis=-1, keepdims=True))).astype(like_x.dtype),)


normalize.defvjp(_normalize_forward, _normalize_backward)


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
