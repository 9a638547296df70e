"""Incremental forward passes of the decoder: a key/value cache, chunk prefill, and bursts of decode steps.

Everything here is a pure function of (model, cache, tokens). A burst of decode steps works on a *window*: one column
per step of the burst, followed by the attended part of the cache. Every row writes step i to column i, so the loop
needs no scatter; `close_window` copies the new columns into the cache, at each row's own position, once per burst. New
columns come first, so that what a row sees stays at the same columns whatever the attended length, which its mates
decide; columns that it does not see have weight exactly 0.

Shapes: B rows (slots) of the cache, P rows of a prefill call, K key/value heads, G query heads per key/value head,
E head width, C capacity, S attended length, W columns of a window, N those of the burst, T tokens of a chunk, D width.
"""

import functools

import jax
import jax.numpy as jnp

from sao_jax.models.config import ModelConfig
from sao_jax.models.decoder import Decoder, rotary_angles

# One (keys [B, K, E, C], values [B, K, C, E]) per layer. Keys lie transposed: q @ keys is then a plain product.
Cache = tuple[tuple[jax.Array, jax.Array], ...]

_BLOCK = 288  # columns of a window in one product


def init_cache(config: ModelConfig, rows: int, capacity: int) -> Cache:
    """An empty cache. `capacity` must exceed the longest sequence by the largest chunk or burst written to it."""
    c = config
    keys = (rows, c.num_kv_heads, c.head_dim, capacity)
    values = (rows, c.num_kv_heads, capacity, c.head_dim)
    return tuple((jnp.zeros(keys, c.dtype), jnp.zeros(values, c.dtype)) for _ in range(c.num_layers))


def _exp(x):
    """exp(x) for x <= 0, to about one unit in the last place; 0 below -87.

    Plain arithmetic gives the same bits however it is compiled; jnp.exp does not: on CPU XLA chooses its form by the
    size of the loop it ends up in, so a row's numbers would depend on the attended length, that is, on its mates.
    """
    n = jnp.round(x * 1.44269504)
    r = (x - n * 0.693359375) + n * 2.12194440e-4  # log 2 in two parts: |r| <= log(2) / 2 without rounding error
    p = jnp.float32(1.98756915e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + c
    power = jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(x > -87.0, (p * r * r + r + 1) * power, 0)


def _attend(q_BxTxHxE, keys_BxKxExW, values_BxKxWxE, visible_BxTxW):
    """Softmax attention of T queries a row over W columns; at least one column is visible to each. [B, T, H, E].

    Columns that are not visible add exact zeros, in products whose order of summation does not depend on W.
    """
    B, T, H, E = q_BxTxHxE.shape
    K, W = keys_BxKxExW.shape[1], keys_BxKxExW.shape[3]
    q = q_BxTxHxE.reshape(B, T, K, H // K, E).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, E)
    # Products over more columns would be split or summed by the library in ways that depend on W.
    blocks = [slice(i, min(i + _BLOCK, W)) for i in range(0, W, _BLOCK)]
    dot = functools.partial(jnp.einsum, "bkte,bkew->bktw", preferred_element_type=jnp.float32)
    scores = jnp.concatenate([dot(q, keys_BxKxExW[..., block]) for block in blocks], axis=-1) * E**-0.5
    scores = jnp.where(jnp.tile(visible_BxTxW, (1, H // K, 1))[:, None], scores, -jnp.inf)
    weights = _exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    out, total = 0.0, 0.0
    for block in blocks:
        w = weights[..., block]
        total += w @ jnp.ones((w.shape[-1], 1))
        out += jnp.einsum("bktw,bkwe->bkte", w.astype(q.dtype), values_BxKxWxE[:, :, block])
    out = (out / total).astype(q.dtype).reshape(B, K, H // K, T, E)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, H, E)


def _write(cache: Cache, new: Cache, slots_P: jax.Array, start_P: jax.Array) -> Cache:
    """Copies row p of `new` into row slots_P[p] of the cache, from position start_P[p] on."""

    def write_row(p, cache):
        def put(old, chunk, index):
            return jax.lax.dynamic_update_slice(old, jax.lax.dynamic_slice_in_dim(chunk, p, 1), index)

        slot, start = slots_P[p], start_P[p]
        return tuple(
            (put(keys, k, (slot, 0, 0, start)), put(values, v, (slot, 0, start, 0)))
            for (keys, values), (k, v) in zip(cache, new, strict=True)
        )

    # A loop over rows: a batched dynamic_update_slice becomes a scatter, which XLA runs element by element on CPU.
    return jax.lax.fori_loop(0, slots_P.shape[0], write_row, cache)


def _columns(new: int) -> int:
    """Columns set aside for new tokens: a multiple of 8, or the sums over the rest would depend on its length."""
    return -(-new // 8) * 8


def extend(model: Decoder, cache: Cache, slots_P, tokens_PxT, start_P, *, attended: int):
    """Feeds a chunk of T tokens a row, at positions start_P.., into the given slots of the cache.

    Row p sees the first start_P[p] <= attended cached positions of its slot and its own chunk causally. Tokens beyond
    a row's true length may be anything: they write positions that are overwritten before they are ever attended.
    Returns (hidden [P, T, D] after the final norm, cache).
    """
    c = model.config
    P, T = tokens_PxT.shape
    positions = start_P[:, None] + jnp.arange(T)
    cos, sin = rotary_angles(positions, c.head_dim, c.rope_theta)
    past = jnp.arange(attended) < start_P[:, None]
    N = _columns(T)
    visible = jnp.concatenate(
        [
            jnp.broadcast_to(jnp.tril(jnp.ones((T, N), bool)), (P, T, N)),
            jnp.broadcast_to(past[:, None], (P, T, attended)),
        ],
        axis=-1,
    )

    def rows_of(array, size):
        return jax.vmap(lambda s: jax.lax.dynamic_slice(array, (s, 0, 0, 0), (1, *size))[0])(slots_P)

    x, new = model.embed_tokens(tokens_PxT), []
    for block, (keys, values) in zip(model.layers, cache, strict=True):
        q, k, v = block.attn.project(x, cos, sin)
        k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
        new.append((k, v))
        k_past = rows_of(keys, (c.num_kv_heads, c.head_dim, attended))
        v_past = rows_of(values, (c.num_kv_heads, attended, c.head_dim))
        # Whatever an earlier sequence left in the slot, 0 * NaN must not come of it.
        v_past = jnp.where(past[:, None, :, None], v_past, 0)
        k = jnp.concatenate([jnp.pad(k, ((0, 0), (0, 0), (0, 0), (0, N - T))), k_past], axis=3)
        v = jnp.concatenate([jnp.pad(v, ((0, 0), (0, 0), (0, N - T), (0, 0))), v_past], axis=2)
        x = x + block.attn.merge(_attend(q, k, v, visible))
        x = x + block.mlp(x)
    return model.final_norm(x), _write(cache, tuple(new), slots_P, start_P)


def open_window(cache: Cache, past_B: jax.Array, *, attended: int, steps: int) -> Cache:
    """Empty columns for `steps` steps and the first `attended` ones of the cache: what a burst works on.

    past_B: number of cached positions of each row, at most `attended`; values beyond it are cleared.
    """
    N = _columns(steps)
    known = (jnp.arange(attended) < past_B[:, None])[:, None, :, None]
    return tuple(
        (
            jnp.pad(keys[..., :attended], ((0, 0), (0, 0), (0, 0), (N, 0))),
            # Whatever an earlier sequence left in the slot, 0 * NaN must not come of it.
            jnp.pad(jnp.where(known, values[:, :, :attended], 0), ((0, 0), (0, 0), (N, 0), (0, 0))),
        )
        for keys, values in cache
    )


def decode_step(model: Decoder, window: Cache, token_B, cos, sin, past_B, step, *, steps: int):
    """Feeds one token a row, as number `step` < `steps` of the burst that began with past_B cached positions.

    cos, sin: [B, 1, E/2] of position past_B + step. Returns (hidden [B, D] after the final norm, window).
    """
    columns, N = jnp.arange(window[0][0].shape[-1]), _columns(steps)
    visible = jnp.where(columns < N, columns <= step, columns - N < past_B[:, None])[:, None]
    x, new = model.embed_tokens(token_B[:, None]), []
    for block, (keys, values) in zip(model.layers, window, strict=True):
        q, k, v = block.attn.project(x, cos, sin)
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k.transpose(0, 2, 3, 1), step, axis=3)
        values = jax.lax.dynamic_update_slice_in_dim(values, v.transpose(0, 2, 1, 3), step, axis=2)
        new.append((keys, values))
        x = x + block.attn.merge(_attend(q, keys, values, visible))
        x = x + block.mlp(x)
    return model.final_norm(x)[:, 0], tuple(new)


def close_window(cache: Cache, window: Cache, past_B: jax.Array, *, steps: int) -> Cache:
    """Copies the columns of a burst into the cache, from each row's position past_B on.

    A row that paused after n steps leaves columns of no meaning beyond past_B + n; they are overwritten before they
    are attended.
    """
    new = tuple((keys[..., :steps], values[:, :, :steps]) for keys, values in window)
    return _write(cache, new, jnp.arange(past_B.shape[0]), past_B)
