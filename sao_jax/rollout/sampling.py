"""Drawing tokens: one uniform number per token, and the log-prob of exactly the distribution it was drawn from.

The distribution is softmax(logits / T) over the whole vocabulary. Top-p and top-k are not offered: a renormalised
distribution in the sampler and the full one in the trainer differ by the log of the kept mass, on every token.
Nothing is banned either, for the same reason.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 32


def check_temperature(temperature: float) -> float:
    """The temperature itself if it is 0 (greedy) or finite and at least 1e-9; ValueError otherwise."""
    if not (temperature == 0 or (1e-9 <= temperature < math.inf)):
        raise ValueError(f"temperature is {temperature}; allowed: 0 (greedy), or a finite number of at least 1e-9")
    return float(temperature)


def token_uniforms(seed_key: jax.Array, rollout_B, attempt_B, index_BxN) -> jax.Array:
    """Uniform numbers in [0, 1), float32 [B, N]: a function of run seed, rollout, attempt and index of the token.

    The slot, the device and the order of calls play no part, so a rollout can be sampled again from the record.
    """
    shape = index_BxN.shape
    parts = jnp.stack([jnp.broadcast_to(x, shape) for x in (rollout_B[:, None], attempt_B[:, None], index_BxN)])

    def fold(keys, part):
        return jax.vmap(jax.vmap(jax.random.fold_in))(keys, part), None

    # A loop, because the hash is slow to compile. The key it ends with is as random as bits drawn from it.
    keys, _ = jax.lax.scan(fold, jnp.broadcast_to(seed_key, shape), parts)
    bits = jax.random.key_data(keys)[..., 0] >> 9
    return jax.lax.bitcast_convert_type(bits | 0x3F800000, jnp.float32) - 1.0


def _cumulative(p_BxV: jax.Array) -> jax.Array:
    """Running sum along the last axis, as two small triangular products (faster on CPU than a scan)."""
    B, V = p_BxV.shape
    blocks = jnp.pad(p_BxV, ((0, 0), (0, -V % _BLOCK))).reshape(B, -1, _BLOCK)
    dot = functools.partial(jnp.matmul, precision="highest")
    within = dot(blocks, np.triu(np.ones((_BLOCK, _BLOCK), np.float32)))
    if (N := blocks.shape[1]) > 1:
        within += dot(within[..., -1], np.triu(np.ones((N, N), np.float32), 1))[..., None]
    return within.reshape(B, -1)[:, :V]


def sample_tokens(logits_BxV, uniform_B, temperature_B) -> tuple[jax.Array, jax.Array]:
    """Draws one token a row by inverting the cumulative distribution: (token int32 [B], log-prob float32 [B]).

    The token is the first whose cumulative probability exceeds the uniform number; a token of probability 0 is never
    drawn. The log-prob is log softmax(logits / T)[token]. T = 0 takes the most likely token (the first one of equals);
    its log-prob is reported at T = 1, since that of a point mass would say nothing. Logits of -inf are allowed.
    """
    logits = logits_BxV.astype(jnp.float32)
    V = logits.shape[-1]
    ids = jnp.arange(V)
    greedy = (temperature_B == 0)[:, None]
    # The maximum is taken off before the division: a tiny temperature then gives 0 and -inf, never inf - inf.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    z = shifted / jnp.where(greedy, 1.0, temperature_B[:, None])
    p = jnp.exp(z)
    weight = jnp.where(greedy, shifted == 0, p)
    cumulative = _cumulative(weight)
    possible = weight > 0
    threshold = jnp.where(greedy, 0.0, uniform_B[:, None]) * cumulative[:, -1:]
    first = jnp.min(jnp.where(possible & (cumulative > threshold), ids, V), axis=-1)
    last = jnp.max(jnp.where(possible, ids, 0), axis=-1)  # for a threshold that rounding has put on the total itself
    token = jnp.minimum(first, last)
    chosen = jnp.take_along_axis(z, token[:, None], axis=-1)[:, 0]
    return token, chosen - jnp.log(jnp.sum(p, axis=-1))


def cut_at_stop(pieces_text: Sequence[str], stop: Sequence[str]) -> int:
    """Number of tokens to keep so that the text ends with the token that completes the first stop string.

    pieces_text: the text of each token. A stop string may lie across token borders and end inside a token; that token
    is kept whole, since it was sampled. Without a match everything is kept. ids, log-probs and masks are to be cut to
    the same number.
    """
    if any(not s for s in stop):
        raise ValueError("a stop string is empty; each must have at least one character")
    reach = max((len(s) for s in stop), default=0)
    text = ""
    for count, piece in enumerate(pieces_text, start=1):
        # A match that ends in this token may begin at most reach - 1 characters before it.
        text = text[max(0, len(text) - reach + 1) :] + piece
        if any(s in text for s in stop):
            return count
    return len(pieces_text)
