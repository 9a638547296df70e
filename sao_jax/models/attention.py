"""Causal self-attention with grouped keys and values, in four forms that compute the same function.

    out_t = sum_{s <= t} softmax_s(q_t . k_s / sqrt(E)) v_s

All take q [B, T, H, E] and k, v [B, T, K, E], where query head h reads key/value head h // (H / K), and return
[B, T, H, E] in the type of v. Scores and softmax are float32. With pack_ids [B, T], integers that never fall along a
row, a row holds several sequences one after the other, and the sum runs over s <= t of the same pack only.

* `causal_attention`: the definition, and the reference in the tests.
* `blockwise_causal_attention`: for CPUs. Never multiplies what the mask hides, and has its own VJP.
* `long_attention`: in memory linear in T, for long rows, and for rows cut over devices.
* the fused kernel behind `jax.nn.dot_product_attention`: for GPUs.

`attention` picks. Letters: B rows, T positions, H query heads, K key/value heads, G = H / K, E head width.
"""

import jax
import jax.numpy as jnp

from sao_jax.models.long_attention import ring_attention, streamed_causal_attention, transposed

MIN_BLOCK = 32
TARGET_BLOCK = 128
MAX_BLOCKS = 16
LONG = 2048  # positions from which on [T, T] scores are not held, except by cuDNN's kernel, which never holds them


def attention(
    q_BxTxHxE: jax.Array,
    k_BxTxKxE: jax.Array,
    v_BxTxKxE: jax.Array,
    pack_ids_BxT: jax.Array | None = None,
    *,
    sequence_axis: str | None = None,
) -> jax.Array:
    """Causal attention in the form that is fastest on the default backend, or the one whose memory does not grow with
    the square of T where T is above `LONG`.

    With `sequence_axis` the arguments are one device's part of rows that are cut over that mesh axis.

    The backend is read when the function is traced. `jax.lax.platform_dependent` would decide later, but it traces
    every branch, and the cuDNN one inspects the GPU while it is traced, which fails on a machine without one.
    """
    if sequence_axis is not None:
        return ring_attention(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT, axis_name=sequence_axis)
    # With packs the kernel takes a bias [T, T].
    if q_BxTxHxE.shape[1] > LONG and (pack_ids_BxT is not None or not _has_flash(q_BxTxHxE)):
        return streamed_causal_attention(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT)
    if jax.default_backend() == "cpu":
        return blockwise_causal_attention(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT)
    return fused_causal_attention(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT)


def causal_attention(
    q_BxTxHxE: jax.Array, k_BxTxKxE: jax.Array, v_BxTxKxE: jax.Array, pack_ids_BxT: jax.Array | None = None
) -> jax.Array:
    """The definition: all T x T scores, masked, softmax, weighted sum."""
    B, T, H, E = q_BxTxHxE.shape
    K = k_BxTxKxE.shape[2]
    q = q_BxTxHxE.reshape(B, T, K, H // K, E)
    scores = jnp.einsum("btkge,bske->bkgts", q, k_BxTxKxE, preferred_element_type=jnp.float32) * E**-0.5
    visible = jnp.tril(jnp.ones((T, T), bool))
    if pack_ids_BxT is not None:
        visible &= _same_pack(pack_ids_BxT, pack_ids_BxT)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v_BxTxKxE.dtype)
    return jnp.einsum("bkgts,bske->btkge", weights, v_BxTxKxE).reshape(B, T, H, E)


def _same_pack(queries_BxT: jax.Array, keys_BxS: jax.Array) -> jax.Array:
    """[B, T, S]: True where query and key are of one pack."""
    return queries_BxT[:, :, None] == keys_BxS[:, None, :]


def fused_causal_attention(
    q_BxTxHxE: jax.Array, k_BxTxKxE: jax.Array, v_BxTxKxE: jax.Array, pack_ids_BxT: jax.Array | None = None
) -> jax.Array:
    """`jax.nn.dot_product_attention`, with cuDNN's flash kernel where that kernel exists.

    The kernel takes 16-bit types and head widths that are a multiple of 8 up to 128; everything else runs as plain
    XLA operations. Packs become a mask [B, 1, T, T].
    """
    mask = None if pack_ids_BxT is None else _same_pack(pack_ids_BxT, pack_ids_BxT)[:, None]
    return jax.nn.dot_product_attention(
        q_BxTxHxE,
        k_BxTxKxE,
        v_BxTxKxE,
        mask=mask,
        is_causal=True,
        implementation="cudnn" if _has_flash(q_BxTxHxE) else None,
    )


def _has_flash(q_BxTxHxE: jax.Array) -> bool:
    E = q_BxTxHxE.shape[-1]
    return jax.default_backend() == "gpu" and q_BxTxHxE.dtype == jnp.bfloat16 and E % 8 == 0 and E <= 128


def block_size(T: int) -> int:
    """Positions per query block: halves of a short row, about 128, more where that would make over 16 blocks.

    A small block skips more of the masked scores but makes smaller products; the blocks are unrolled, so their number
    also bounds the size of the program.
    """
    half = -(-T // 2)
    return max(min(max(half, MIN_BLOCK), TARGET_BLOCK), -(-T // MAX_BLOCKS))


@jax.custom_vjp
def blockwise_causal_attention(
    q_BxTxHxE: jax.Array, k_BxTxKxE: jax.Array, v_BxTxKxE: jax.Array, pack_ids_BxT: jax.Array | None = None
) -> jax.Array:
    """Causal attention by blocks of queries, each against the keys up to its own end only.

    The query heads of one key/value head become rows of one matrix, so that every product is an ordinary batched
    matrix multiply over B * K matrices. Per block the forward pass keeps e = exp(s - max s), its row sums and the
    output; with them the backward pass needs no exponential and no second softmax.
    """
    return _forward(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT)[0]


def _blocks(T: int):
    size = block_size(T)
    return [(start, min(start + size, T)) for start in range(0, T, size)]


def _fold(x_BxTxHxE: jax.Array, K: int) -> jax.Array:
    """[B, t, K * G, E] -> [B, K, G * t, E]: heads first, the heads of a group as further rows."""
    B, t, H, E = x_BxTxHxE.shape
    return x_BxTxHxE.reshape(B, t, K, H // K, E).transpose(0, 2, 3, 1, 4).reshape(B, K, H // K * t, E)


def _unfold(x_BxKxRxE: jax.Array, t: int) -> jax.Array:
    """The inverse of `_fold`: [B, K, G * t, E] -> [B, t, K * G, E]."""
    B, K, R, E = x_BxKxRxE.shape
    return x_BxKxRxE.reshape(B, K, R // t, t, E).transpose(0, 3, 1, 2, 4).reshape(B, t, K * R // t, E)


def _nt(a, b, dtype=jnp.float32):
    """a @ b^T over the last two axes."""
    return jnp.einsum("bkre,bkse->bkrs", a, b, preferred_element_type=dtype)


def _nn(a, b, dtype=jnp.float32):
    """a @ b over the last two axes."""
    return jnp.einsum("bkrs,bkse->bkre", a, b, preferred_element_type=dtype)


def _forward(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT=None):
    T, E = q_BxTxHxE.shape[1], q_BxTxHxE.shape[3]
    K = k_BxTxKxE.shape[2]
    G = q_BxTxHxE.shape[2] // K
    dtype = v_BxTxKxE.dtype
    k = k_BxTxKxE.swapaxes(1, 2)
    v = v_BxTxKxE.swapaxes(1, 2)
    outs, saved = [], []
    for start, end in _blocks(T):
        q = _fold(q_BxTxHxE[:, start:end], K)
        scores = _nt(q, k[:, :, :end]) * E**-0.5
        # Row r of the folded block is query position start + r % (end - start).
        row = start + jnp.arange(G * (end - start)) % (end - start)
        visible = row[:, None] >= jnp.arange(end)
        if pack_ids_BxT is not None:
            visible &= _same_pack(jnp.tile(pack_ids_BxT[:, start:end], (1, G)), pack_ids_BxT[:, :end])[:, None]
        scores = jnp.where(visible, scores, -jnp.inf)
        e = jnp.exp(scores - scores.max(-1, keepdims=True))
        total = e.sum(-1, keepdims=True)
        e = e.astype(dtype)
        out = _nn(e, v[:, :, :end]) / total
        outs.append(_unfold(out.astype(dtype), end - start))
        saved.append((q, out, total, e))
    return jnp.concatenate(outs, axis=1), (k, v, saved)


def _backward(residuals, dout_BxTxHxE):
    """With P = e / sum, D = dout / sum:  dv = D^T e (per key),  ds = e * (D v^T - rowsum(D * out)),
    dq = ds k / sqrt(E),  dk = ds^T q / sqrt(E)."""
    k, v, saved = residuals
    K, T, E = k.shape[1:]
    dtype = k.dtype
    dqs, dk_t, dv_t = [], 0.0, 0.0
    for (start, end), (q, out, total, e) in zip(_blocks(T), saved, strict=True):
        d = _fold(dout_BxTxHxE[:, start:end], K).astype(jnp.float32) / total
        inner = (d * out).sum(-1, keepdims=True)
        d = d.astype(dtype)
        ds = (e * (_nt(d, v[:, :, :end]) - inner)).astype(dtype)
        dqs.append(_unfold((_nn(ds, k[:, :, :end]) * E**-0.5).astype(dtype), end - start))
        beyond = ((0, 0), (0, 0), (0, 0), (0, T - end))
        dk_t = dk_t + jnp.pad(_nn(transposed(q), ds), beyond)
        dv_t = dv_t + jnp.pad(_nn(transposed(d), e), beyond)
    dk = (dk_t * E**-0.5).astype(dtype).transpose(0, 3, 1, 2)
    return jnp.concatenate(dqs, axis=1), dk, dv_t.astype(dtype).transpose(0, 3, 1, 2), None


blockwise_causal_attention.defvjp(_forward, _backward)
