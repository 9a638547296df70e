"""Causal attention whose memory grows with the length of the row, and the same with the row cut over devices.

Queries and keys are taken in blocks of C positions. For each block of queries a running maximum m, the sum l of
exp(score - m) and the weighted sum a of values are brought up to date with one block of keys after the other, so
that C x C scores exist at a time. The backward pass keeps q, k, v, the output and log l + m of each query, and
computes the scores again.

With the sequence axis cut over the devices of a mesh axis, each keeps its own queries while keys and values (in the
backward pass their gradients too) travel once around the ring. On one device there is nothing to travel: both are one
function. Blocks of keys that no query of the block sees, because they lie ahead or hold earlier packs only, are
skipped.

Letters as in `attention`; N blocks of C positions. Blocks of queries are [N, B, K, G * C, E], of keys [N, B, K, C, E].
"""

import functools
import typing

import jax
import jax.numpy as jnp

BLOCK = 256
_LOW = -1e30  # below every score, and finite: the difference of two of them is 0


def streamed_causal_attention(
    q_BxTxHxE: jax.Array, k_BxTxKxE: jax.Array, v_BxTxKxE: jax.Array, pack_ids_BxT: jax.Array | None = None
) -> jax.Array:
    """Causal attention, see `attention`, in memory linear in T: for long rows."""
    return _ring(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT, None)


def ring_attention(
    q_BxTxHxE: jax.Array,
    k_BxTxKxE: jax.Array,
    v_BxTxKxE: jax.Array,
    pack_ids_BxT: jax.Array | None = None,
    *,
    axis_name: str,
) -> jax.Array:
    """Causal attention over a row that is cut, in order, into equal parts over the mesh axis `axis_name`.

    Arguments and result are one device's part, T positions of n * T; call it inside `shard_map`. Device d computes
    d + 1 of the n parts, so the last one sets the time.
    """
    return _ring(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT, axis_name)


def transposed(x):
    """x with its last two axes swapped, really moved in memory.

    XLA would fold the transposition into the product that follows and run it in the form A^T B, which on CPU reaches a
    third of the speed of A B. The barrier keeps the (small) copy.
    """
    return jax.lax.optimization_barrier(x.swapaxes(-1, -2))


class _Keys(typing.NamedTuple):
    """What travels around the ring."""

    k: jax.Array  # [N, B, K, C, E]
    v: jax.Array
    ids: jax.Array | None  # [N, B, C]


def _cut(x_BxTxHxE, K: int, N: int, C: int):
    """[B, T, K * G, E] -> [N, B, K, G * C, E], padded with zeros to N * C positions."""
    B, T, H, E = x_BxTxHxE.shape
    x = jnp.pad(x_BxTxHxE, ((0, 0), (0, N * C - T), (0, 0), (0, 0)))
    return x.reshape(B, N, C, K, H // K, E).transpose(1, 0, 3, 4, 2, 5).reshape(N, B, K, H // K * C, E)


def _join(x_NxBxKxRxE, T: int, C: int):
    """The inverse of `_cut`."""
    N, B, K, R, E = x_NxBxKxRxE.shape
    x = x_NxBxKxRxE.reshape(N, B, K, R // C, C, E).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(B, N * C, K * R // C, E)[:, :T]


def _cut_ids(ids_BxT, N: int, C: int):
    if ids_BxT is None:
        return None
    B, T = ids_BxT.shape
    return jnp.pad(ids_BxT, ((0, 0), (0, N * C - T)), mode="edge").reshape(B, N, C).swapaxes(0, 1)


def _sizes(T: int) -> tuple[int, int]:
    """(N, C): blocks of at most BLOCK positions, all of one size."""
    N = -(-T // BLOCK)
    return N, -(-T // N)


def _scores(q, k, E):
    return jnp.einsum("bkre,bkse->bkrs", q, k, preferred_element_type=jnp.float32) * E**-0.5


def _times(a, b):
    return jnp.einsum("bkrs,bkse->bkre", a, b, preferred_element_type=jnp.float32)


def _visible(q_at, k_at, k_left, q_ids, k_ids, G: int, C: int):
    """[1 or B, 1, G * C, C]: what a block of queries from position q_at on sees of the keys from k_at on, of which
    k_left are not padding."""
    rows = q_at + jnp.arange(G * C) % C
    visible = (rows[:, None] >= k_at + jnp.arange(C)) & (jnp.arange(C) < k_left)
    if q_ids is None:
        return visible[None, None]
    return (visible & (jnp.tile(q_ids, (1, G))[:, :, None] == k_ids[:, None, :]))[:, None]


def _range(q_at, keys_at, q_ids, keys: _Keys, N: int, C: int):
    """The first and the end of the blocks of keys, whose positions begin at keys_at, that a block of queries sees."""
    end = jnp.clip((q_at + C - 1 - keys_at) // C + 1, 0, N)
    if q_ids is None:
        return 0, end
    earlier = jnp.all(keys.ids[:, :, -1] < q_ids[:, 0], axis=1)  # ids never fall: these are the first blocks
    return jnp.sum(earlier, dtype=jnp.int32), end


def _zero(axis, *arrays):
    """0, of a type that varies over the mesh axes over which any of the arrays does, as the carry of a loop over them
    must from the first. Added to zeros; their values, which may be NaN, stay out of it."""
    arrays += () if axis is None else (jax.lax.axis_index(axis),)
    firsts = [x[(0,) * x.ndim] for x in arrays if x is not None]
    return sum(jnp.where(False, x.astype(jnp.float32), 0.0) for x in firsts)


def _around(axis, visit, state, keys):
    """state after visit(state, keys, owner of the keys) for the keys of every device, beginning with its own.

    `visit` returns (state, what travels on): the keys, and in the backward pass their gradients.
    """
    if axis is None:
        return visit(state, keys, 0)
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)

    def turn(r, carry):
        state, keys = visit(*carry, (me - r) % n)
        return state, jax.lax.ppermute(keys, axis, [(d, (d + 1) % n) for d in range(n)])

    return jax.lax.fori_loop(0, n, turn, (state, keys))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _ring(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT, axis):
    return _forward(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT, axis)[0]


def _forward(q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT, axis):
    B, T, H, E = q_BxTxHxE.shape
    K = k_BxTxKxE.shape[2]
    G, (N, C) = H // K, _sizes(T)
    mine = 0 if axis is None else jax.lax.axis_index(axis) * T
    q, ids = _cut(q_BxTxHxE, K, N, C), _cut_ids(pack_ids_BxT, N, C)
    keys = _Keys(_cut(k_BxTxKxE, K, N, C), _cut(v_BxTxKxE, K, N, C), ids)
    zero = _zero(axis, q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT)

    def visit(state, keys, owner):
        theirs = owner * T

        def queries(_, x):
            i, q, q_ids, state = x
            q_at = mine + i * C

            def step(j, state):
                top, total, out = state
                k_ids = None if q_ids is None else keys.ids[j]
                scores = _scores(q, keys.k[j], E)
                seen = _visible(q_at, theirs + j * C, T - j * C, q_ids, k_ids, G, C)
                scores = jnp.where(seen, scores, -jnp.inf)
                new = jnp.maximum(top, scores.max(-1, keepdims=True))
                e, shrink = jnp.exp(scores - new), jnp.exp(top - new)
                total = total * shrink + e.sum(-1, keepdims=True)
                return new, total, out * shrink + _times(e.astype(v_BxTxKxE.dtype), keys.v[j])

            return None, jax.lax.fori_loop(*_range(q_at, theirs, q_ids, keys, N, C), step, state)

        return jax.lax.scan(queries, None, (jnp.arange(N), q, ids, state))[1], keys

    rows = (N, B, K, G * C)
    state = (jnp.full((*rows, 1), _LOW) + zero, jnp.zeros((*rows, 1)) + zero, jnp.zeros((*rows, E)) + zero)
    (top, total, out), _ = _around(axis, visit, state, keys)
    out = _join((out / total).astype(v_BxTxKxE.dtype), T, C)
    return out, (q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT, out, top + jnp.log(total))


def _backward(axis, residuals, dout_BxTxHxE):
    """With P = exp(s - log sum):  dv = P^T dout,  ds = P * (dout v^T - rowsum(dout * out)),  dq = ds k / sqrt(E),
    dk = ds^T q / sqrt(E)."""
    q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT, out_BxTxHxE, log_total = residuals
    B, T, H, E = q_BxTxHxE.shape
    K = k_BxTxKxE.shape[2]
    G, (N, C) = H // K, _sizes(T)
    dtype = v_BxTxKxE.dtype
    mine = 0 if axis is None else jax.lax.axis_index(axis) * T
    q, d, ids = _cut(q_BxTxHxE, K, N, C), _cut(dout_BxTxHxE, K, N, C), _cut_ids(pack_ids_BxT, N, C)
    inner = (dout_BxTxHxE.astype(jnp.float32) * out_BxTxHxE).sum(-1, keepdims=True)
    inner = _cut(inner, K, N, C)
    keys = _Keys(_cut(k_BxTxKxE, K, N, C), _cut(v_BxTxKxE, K, N, C), ids)
    zero = _zero(axis, q_BxTxHxE, k_BxTxKxE, v_BxTxKxE, pack_ids_BxT, dout_BxTxHxE)

    def visit(dq, travelling, owner):
        keys, slopes = travelling
        theirs = owner * T

        def queries(slopes, x):
            i, q, q_ids, d, inner, log_total, dq = x
            q_at = mine + i * C
            q_t, d_t = transposed(q), transposed(d)

            def step(j, carry):
                dq, dk_t, dv_t = carry
                k_ids = None if q_ids is None else keys.ids[j]
                seen = _visible(q_at, theirs + j * C, T - j * C, q_ids, k_ids, G, C)
                p = jnp.exp(jnp.where(seen, _scores(q, keys.k[j], E) - log_total, -jnp.inf))
                ds = p * (jnp.einsum("bkre,bkse->bkrs", d, keys.v[j], preferred_element_type=jnp.float32) - inner)
                p, ds = p.astype(dtype), ds.astype(dtype)
                return (
                    dq + _times(ds, keys.k[j]),
                    dk_t.at[j].add(_times(q_t, ds)),
                    dv_t.at[j].add(_times(d_t, p)),
                )

            dq, *slopes = jax.lax.fori_loop(*_range(q_at, theirs, q_ids, keys, N, C), step, (dq, *slopes))
            return tuple(slopes), dq

        slopes, dq = jax.lax.scan(queries, slopes, (jnp.arange(N), q, ids, d, inner, log_total, dq))
        return dq, (keys, slopes)

    slope = jnp.zeros((N, B, K, E, C)) + zero
    dq = jnp.zeros((N, B, K, G * C, E)) + zero
    dq, (_, (dk_t, dv_t)) = _around(axis, visit, dq, (keys, (slope, slope)))

    def whole(slope_t):
        return _join(slope_t.swapaxes(-1, -2), T, C)

    dq, dk = _join(dq * E**-0.5, T, C), whole(dk_t * E**-0.5)
    return dq.astype(q_BxTxHxE.dtype), dk.astype(k_BxTxKxE.dtype), whole(dv_t).astype(dtype), None


_ring.defvjp(_forward, _backward)
