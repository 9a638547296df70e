"""Log-probabilities of given tokens under softmax(hidden @ head / temperature), without keeping [N, V] arrays.

Letters: N tokens, D width, V vocabulary, B rows, T positions.
"""

import functools

import jax
import jax.numpy as jnp

# Float32 logits held at once, 16 MiB on CPU and 512 MiB on an accelerator, where few rows at a time would waste the
# matrix units. The backward pass has about three arrays of this size.
MAX_LOGITS_CPU = 2**22
MAX_LOGITS_ACCELERATOR = 2**27
# Where only some tokens are asked for: this many chunks, of which those without any are skipped. Putting these tokens
# together and computing logits again costs more than that saves where the vocabulary or the number of tokens is small.
LIVE_CHUNKS, LIVE_CHUNK, LIVE_VOCABULARY = 8, 128, 1024


def token_logprobs(
    hidden_NxD: jax.Array,
    head_DxV: jax.Array,
    targets_N: jax.Array,
    temperature_N: jax.Array,
    *,
    chunk: int | None = None,
    live_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(log p(target), entropy of p) per token with p = softmax(logits / temperature), both float32 [N].

    The product accumulates in float32 and everything after it is float32, whatever the type of `hidden`: near -12 a
    bfloat16 log-prob is wrong by several per cent of a ratio.

    Args:
      hidden_NxD: final hidden states, any float type.
      head_DxV: matrix to logits; used in the type of `hidden`.
      targets_N: token ids in [0, V).
      temperature_N: positive; a scalar is allowed. Greedy tokens (temperature 0) have no log-prob here.
      chunk: tokens whose logits exist at the same time, forward and backward; logits of a chunk are computed again in
        the backward pass. None: all N where N * V is small, else as many as fit the limits above; with live_N and a
        vocabulary of 1,024 or more at most an eighth of N, or 128.
      live_N: bool; tokens that nobody asks for otherwise, such as observations. Where there are several chunks the live
        tokens are put together first and chunks without any are skipped, so that the cost follows the live tokens; what
        is returned for others has no meaning.

    Raises:
      ValueError: chunk below 1.
    """
    N, V = hidden_NxD.shape[0], head_DxV.shape[1]
    if chunk is None:
        budget = MAX_LOGITS_CPU if jax.default_backend() == "cpu" else MAX_LOGITS_ACCELERATOR
        chunk = max(1, budget // V)
        if live_N is not None and V >= LIVE_VOCABULARY:
            chunk = min(chunk, max(LIVE_CHUNK, -(-N // LIVE_CHUNKS)))
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    temperature_N = jnp.broadcast_to(jnp.asarray(temperature_N, jnp.float32), (N,))
    head_DxV = head_DxV.astype(hidden_NxD.dtype)
    if chunk >= N:
        return _score(hidden_NxD, head_DxV, targets_N, temperature_N)

    order = None
    if live_N is not None:
        order = jnp.argsort(~live_N, stable=True)
        hidden_NxD, targets_N, temperature_N = hidden_NxD[order], targets_N[order], temperature_N[order]

    # Equal chunks, so that at most num_chunks - 1 rows are padding.
    num_chunks = -(-N // chunk)
    chunk = -(-N // num_chunks)

    def split(x, fill):
        padding = [(0, num_chunks * chunk - N)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, padding, constant_values=fill).reshape(num_chunks, chunk, *x.shape[1:])

    score = jax.checkpoint(lambda xs: _score(xs[0], head_DxV, *xs[1:]))
    parts = split(hidden_NxD, 0), split(targets_N, 0), split(temperature_N, 1)
    if order is None:
        logp, entropy = jax.lax.map(score, parts)
        return logp.reshape(-1)[:N], entropy.reshape(-1)[:N]

    def score_if_live(xs):
        nothing = 0.0 * xs[0][-1]  # from an input, or it would have another type than scores under shard_map
        return jax.lax.cond(xs[1], score, lambda xs: (nothing, nothing), xs[0])

    count = live_N.sum()
    logp, entropy = jax.lax.map(score_if_live, (parts, jnp.arange(num_chunks) * chunk < count))
    places = jnp.argsort(order)
    return logp.reshape(-1)[:N][places], entropy.reshape(-1)[:N][places]


def _score(hidden_NxD, head_DxV, targets_N, temperature_N):
    logits = jnp.matmul(hidden_NxD, head_DxV, preferred_element_type=jnp.float32) / temperature_N[:, None]
    logits = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    exp_logits = jnp.exp(logits)
    total = exp_logits.sum(axis=-1)
    log_total = jnp.log(total)
    # A comparison instead of a gather: its transpose is a select, where that of a gather is a slow scatter-add.
    is_target = targets_N[:, None] == jnp.arange(logits.shape[1])
    logp = jnp.where(is_target, logits, 0.0).sum(axis=-1) - log_total
    # H = log Z - E[logit]. exp_logits * logits is finite: where exp underflows to 0 the logit is still finite.
    entropy = log_total - (exp_logits * logits).sum(axis=-1) / total
    return logp, entropy


def next_token_logprobs(
    hidden_BxTxD: jax.Array,
    head_DxV: jax.Array,
    tokens_BxT: jax.Array,
    temperature_B: jax.Array,
    *,
    chunk: int | None = None,
    pack_ids_BxT: jax.Array | None = None,
    live_BxT: jax.Array | None = None,
    sequence_axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(log-prob, entropy) [B, T] aligned with the tokens: entry t scores token t from the hidden state at t - 1.

    Entry 0 of both is 0: the first token of a row is predicted by nothing. The entropy at t is that of the
    distribution token t was drawn from, so one mask over tokens serves both. With `pack_ids`, several trajectories lie
    in one row and the first token of each has entry 0 as well; the temperature may then be one per token [B, T], that
    with which the token was drawn. With `live` the entries of all other tokens are 0, see `token_logprobs`. With
    `sequence_axis` arguments and results are one device's part of rows that are cut over that mesh axis.
    """
    B, T, D = hidden_BxTxD.shape
    # All B * T positions are scored and the last of each row is thrown away; slicing first would copy the hidden
    # states into a matrix of awkward size.
    shift = functools.partial(_shifted, axis=sequence_axis)
    targets = shift(tokens_BxT, -1).reshape(-1)
    temperature = jnp.asarray(temperature_B, jnp.float32)
    if temperature.ndim == 2:
        temperature = shift(temperature, -1, ends=1.0).reshape(-1)
    else:
        temperature = jnp.repeat(jnp.broadcast_to(temperature, (B,)), T)
    live = None if live_BxT is None else shift(live_BxT, -1).reshape(-1)
    scores = token_logprobs(hidden_BxTxD.reshape(B * T, D), head_DxV, targets, temperature, chunk=chunk, live_N=live)
    first = 0 if sequence_axis is None else jax.lax.axis_index(sequence_axis) * T
    scored = jnp.broadcast_to(first + jnp.arange(T) > 0, (B, T))
    if pack_ids_BxT is not None:
        scored &= pack_ids_BxT == shift(pack_ids_BxT, 1)
    if live_BxT is not None:
        scored &= live_BxT
    logp, entropy = (jnp.where(scored, shift(x.reshape(B, T), 1), 0.0) for x in scores)
    return logp, entropy


def _shifted(x_BxT: jax.Array, by: int, *, axis: str | None, ends: float = 0) -> jax.Array:
    """Rows shifted right by one (by = 1) or left (-1). What comes in at the end of a row is of no use to the caller; it
    is `ends` where rows are cut over a mesh axis, whose devices hand one entry to each other."""
    rolled = jnp.roll(x_BxT, by, axis=1)
    if axis is None:
        return rolled
    n, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    at, last = (0, 0) if by == 1 else (-1, n - 1)
    handed = jax.lax.ppermute(rolled[:, at], axis, [(i, i + by) for i in range(n) if 0 <= i + by < n])
    return rolled.at[:, at].set(jnp.where(me == last, jnp.asarray(ends, x_BxT.dtype), handed))
