"""Memory of finished segments in compressed form: latent keys and values, and a critic that reads kept states.

A trajectory is read in segments. A token attends to its own segment exactly and to earlier segments through what was
kept of them: a code per token and layer of [key before rotation, value], decoded and rotated again on use. Keys are
kept unrotated because a rotation by position would spread what is alike over all directions.

Two forms compute the same function: `forward` reads whole rows at once, for training and scoring; `read_segment` reads
one segment after another and holds nothing but codes of the earlier ones, decoded block by block.

Shapes: B rows, T positions, L positions of a segment, M codes held, D width, H query heads, K key/value heads, E head
width, F = 2 K E the width of a token's keys and values in one layer.
"""

import jax
import jax.numpy as jnp

from sao_jax.models import compressor
from sao_jax.models.attention import attention
from sao_jax.models.compressor import Code, CompressorConfig
from sao_jax.models.config import ModelConfig
from sao_jax.models.decoder import Decoder, rotary_angles, rotate

BLOCK = 256  # codes decoded at a time
Memory = tuple[Code, ...]  # one per layer, leading axes [B, M]


def kv_width(config: ModelConfig) -> int:
    """Numbers per token and layer in keys and values."""
    return 2 * config.num_kv_heads * config.head_dim


def flatten_kv(k_BxTxKxE, v_BxTxKxE, cos, sin):
    """[B, T, F]: keys rotated back to position 0, then values."""
    B, T = k_BxTxKxE.shape[:2]
    return jnp.concatenate([rotate(k_BxTxKxE, cos, -sin), v_BxTxKxE], axis=2).reshape(B, T, -1)


def unflatten_kv(config: ModelConfig, kv_BxTxF, cos, sin):
    """The inverse of `flatten_kv`: (k, v), each [B, T, K, E]."""
    kv = kv_BxTxF.reshape(*kv_BxTxF.shape[:2], 2 * config.num_kv_heads, config.head_dim)
    k, v = jnp.split(kv, 2, axis=2)
    return rotate(k, cos, sin), v


def _scores(q_BxTxHxE, k_BxSxKxE):
    """float32 [B, K, H / K, T, S]."""
    B, T, H, E = q_BxTxHxE.shape
    K = k_BxSxKxE.shape[2]
    q = q_BxTxHxE.reshape(B, T, K, H // K, E)
    return jnp.einsum("btkge,bske->bkgts", q, k_BxSxKxE, preferred_element_type=jnp.float32) * E**-0.5


def _weighted(weights_BxKxGxTxS, v_BxSxKxE):
    return jnp.einsum("bkgts,bske->bkgte", weights_BxKxGxTxS, v_BxSxKxE, preferred_element_type=jnp.float32)


def _heads(out_BxKxGxTxE, dtype):
    B, K, G, T, E = out_BxKxGxTxE.shape
    return out_BxKxGxTxE.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, E).astype(dtype)


def forward(model: Decoder, tokens_BxT, segment: int, codec: CompressorConfig | None = None, params=None):
    """Hidden states [B, T, D] of whole rows, and per layer (kv rows [B T, F], decoded, router probs, experts).

    `params` are those of one compressor per layer. Without `codec` earlier segments are attended to exactly: that is
    `model(tokens)`. The gradient reaches the compressors through every later segment (nothing is cut off).
    """
    if codec is None:
        return model(tokens_BxT), []
    c = model.config
    B, T = tokens_BxT.shape
    cos, sin = rotary_angles(jnp.arange(T), c.head_dim, c.rope_theta)
    x, seen = model.embed_tokens(tokens_BxT), []
    for block, weights in zip(model.layers, params, strict=True):
        q, k, v = block.attn.project(x, cos, sin)
        kv = flatten_kv(k, v, cos, sin).reshape(B * T, -1).astype(jnp.float32)
        decoded, code, probs = compressor.bind(codec, weights)(kv)
        seen.append((kv, decoded, probs, code.experts))
        k_old, v_old = unflatten_kv(c, decoded.reshape(B, T, -1).astype(k.dtype), cos, sin)
        x = x + block.attn.merge(_attend_segments(q, k, v, k_old, v_old, segment))
        x = x + block.mlp(x)
    return model.final_norm(x), seen


def kv_rows(model: Decoder, tokens_BxT) -> list[jax.Array]:
    """What there is to compress when nothing is compressed yet: [B, T, F] of each layer."""
    c = model.config
    cos, sin = rotary_angles(jnp.arange(tokens_BxT.shape[1]), c.head_dim, c.rope_theta)
    x, rows = model.embed_tokens(tokens_BxT), []
    for block in model.layers:
        q, k, v = block.attn.project(x, cos, sin)
        rows.append(flatten_kv(k, v, cos, sin).astype(jnp.float32))
        x = x + block.attn.merge(attention(q, k, v))
        x = x + block.mlp(x)
    return rows


def _attend_segments(q, k, v, k_old, v_old, segment):
    """Each segment to itself through k and v, to earlier ones through k_old and v_old; scores are [segment, T]."""
    B, T = q.shape[:2]
    count = -(-T // segment)

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, count * segment - T), (0, 0), (0, 0)))
        return x.reshape(B, count, segment, *x.shape[2:]).swapaxes(0, 1)

    def one(args):
        i, q, k, v = args
        own = jnp.where(jnp.tril(jnp.ones((segment, segment), bool)), _scores(q, k), -jnp.inf)
        old = jnp.where(jnp.arange(T) < i * segment, _scores(q, k_old), -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([old, own], axis=-1), axis=-1).astype(v.dtype)
        return _heads(_weighted(weights[..., :T], v_old) + _weighted(weights[..., T:], v), v.dtype)

    outs = jax.lax.map(jax.checkpoint(one), (jnp.arange(count), cut(q), cut(k), cut(v)))
    return outs.swapaxes(0, 1).reshape(B, count * segment, *q.shape[2:])[:, :T]


# -- one segment after another -----------------------------------------------------------------------------------------


def init_memory(config: ModelConfig, codec: CompressorConfig, rows: int, capacity: int) -> Memory:
    """An empty memory for `capacity` tokens a row, a multiple of `BLOCK` where it is longer than that.

    Raises ValueError otherwise.
    """
    if capacity > BLOCK and capacity % BLOCK:
        raise ValueError(f"a memory of {capacity} tokens is not a multiple of {BLOCK}")
    experts = codec.top_k if codec.experts > 1 else 0
    gates = codec.top_k if codec.top_k > 1 else 0
    return tuple(
        Code(
            jnp.zeros((rows, capacity, codec.width), jnp.float32),
            jnp.zeros((rows, capacity, experts), jnp.uint8),
            jnp.zeros((rows, capacity, gates), jnp.float32),
        )
        for _ in range(config.num_layers)
    )


def read_segment(model: Decoder, codec: CompressorConfig, params, memory: Memory, tokens_BxL, start):
    """(hidden states [B, L, D] of the segment at positions start.., the memory with its codes added).

    Memory positions below `start` (traced) are attended to, in blocks: what is decoded at a time does not grow with
    the history, and the time of a segment follows what is held. `start` + L must fit the memory; compile it once and
    call it for every segment.
    """
    c = model.config
    B, L = tokens_BxL.shape
    cos, sin = rotary_angles(start + jnp.arange(L), c.head_dim, c.rope_theta)
    x, held = model.embed_tokens(tokens_BxL), []
    for block, codes, weights in zip(model.layers, memory, params, strict=True):
        q, k, v = block.attn.project(x, cos, sin)
        codec_model = compressor.bind(codec, weights)
        new = codec_model.compact(codec_model.encode(flatten_kv(k, v, cos, sin).reshape(B * L, -1))[0])
        # Written before the older ones are read: XLA would copy the memory if it had to change after that.
        codes = Code(
            *(
                jax.lax.dynamic_update_slice_in_dim(old, part.reshape(B, L, -1), start, 1)
                for old, part in zip(codes, new, strict=True)
            )
        )
        x = x + block.attn.merge(_attend(c, codec_model, codes, q, k, v, start))
        x = x + block.mlp(x)
        held.append(codes)
    return model.final_norm(x), tuple(held)


def _attend(config, codec_model, codes, q, k, v, start):
    """Softmax over the segment itself (causal) and the memory below `start`, summed up block by block."""
    B, L = q.shape[:2]
    own = jnp.where(jnp.tril(jnp.ones((L, L), bool)), _scores(q, k), -jnp.inf)
    top = own.max(-1, keepdims=True)
    e = jnp.exp(own - top)
    size = min(BLOCK, codes.latent.shape[1])

    def add(i, carry):
        top, total, out = carry
        part = Code(*(jax.lax.dynamic_slice_in_dim(x, i * size, size, 1) for x in codes))
        kv = codec_model.decode(Code(*(x.reshape(B * size, -1) for x in part))).reshape(B, size, -1)
        positions = i * size + jnp.arange(size)
        k_old, v_old = unflatten_kv(config, kv, *rotary_angles(positions, config.head_dim, config.rope_theta))
        scores = jnp.where(positions < start, _scores(q, k_old.astype(k.dtype)), -jnp.inf)
        new = jnp.maximum(top, scores.max(-1, keepdims=True))
        e, scale = jnp.exp(scores - new), jnp.exp(top - new)
        return new, total * scale + e.sum(-1, keepdims=True), out * scale + _weighted(e, v_old)

    carry = (top, e.sum(-1, keepdims=True), _weighted(e, v))
    _, total, out = jax.lax.fori_loop(0, (start + size - 1) // size, add, carry)
    return _heads(out / total, v.dtype)


# -- a critic over long histories --------------------------------------------------------------------------------------


def kept_positions(action_mask_BxT, segment: int):
    """bool [B, T]: states that stay after a segment has ended.

    Those of action tokens, those that an action token was chosen from (so that it can be scored again), and the last
    one of each segment.
    """
    last = jnp.arange(action_mask_BxT.shape[1]) % segment == segment - 1
    before = jnp.pad(action_mask_BxT[:, 1:], ((0, 0), (0, 1)))
    return action_mask_BxT | before | last


def segment_states(model: Decoder, tokens_BxT, segment: int):
    """[B, T, D]: hidden states of each segment read by itself, from position 0. T is a multiple of `segment`."""
    B, T = tokens_BxT.shape
    return model(tokens_BxT.reshape(-1, segment)).reshape(B, T, -1)


def init_readout(config: ModelConfig, key: jax.Array, value: dict, width: int = 64) -> dict:
    """A value head over a token's own state and what it reads in the memory. It starts as `value` {w [D, 1], b [1]},
    which reads the own state alone."""
    D = config.dim
    a, b, c = jax.random.split(key, 3)
    return {
        "query": jax.random.normal(a, (D, width)) * D**-0.5,
        "key": jax.random.normal(b, (D, width)) * D**-0.5,
        "value": jax.random.normal(c, (D, width)) * D**-0.5,
        "age": jnp.zeros(()),
        "own": value["w"][:, 0],
        "read": jnp.zeros((width,)),
        "bias": value["b"][0],
    }


def memory_values(readout: dict, states_BxTxD, memory_BxTxD, kept_BxT, segment: int):
    """Critic outputs float32 [B, T]: entry t is the value of the prefix that ends with token t.

        V_t = own . h_t + read . sum_j a_tj (m_j value) + bias,
        a_t = softmax over kept j of earlier segments, and a slot of score 0 that holds nothing,
              of  (h_t query) . (m_j key) / sqrt(A) - age * (segments between)

    `memory` holds the states at the same positions as they come out of the memory, decoded or exact. A token sees
    nothing of its own segment there: its state knows that already.
    """
    h, m = states_BxTxD.astype(jnp.float32), memory_BxTxD.astype(jnp.float32)
    T, A = h.shape[1], readout["query"].shape[1]
    number = jnp.arange(T) // segment
    between = number[:, None] - number[None, :]
    scores = jnp.einsum("bta,bsa->bts", h @ readout["query"], m @ readout["key"]) * A**-0.5
    visible = (between > 0) & kept_BxT[:, None, :]
    scores = jnp.where(visible, scores - readout["age"] * between, -jnp.inf)
    scores = jnp.concatenate([scores, jnp.zeros((*scores.shape[:2], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :-1]
    read = jnp.einsum("bts,bsa->bta", weights, m @ readout["value"])
    return h @ readout["own"] + read @ readout["read"] + readout["bias"]
