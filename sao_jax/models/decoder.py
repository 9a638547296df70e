"""A decoder-only language model in Flax NNX.

Layers are NNX modules; everything above them works on plain nested dicts of arrays:

    params = init_params(config, key)            # {"embed": [V, D], "layers": {"0": {...}}, "norm": [D], ...}
    model = bind(config, params)                 # inside a jitted function
    hidden = model(tokens_BxT)                   # [B, T, D]

Shapes: B rows, T positions, D width, H query heads, K key/value heads, E head width, F MLP width, V vocabulary.
Weight products are done on [B*T, D], which is what the hardware likes best.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from sao_jax.models.attention import attention, causal_attention  # noqa: F401 (re-exported)
from sao_jax.models.compute import PLAIN, Compute, apply_blocks
from sao_jax.models.config import ModelConfig
from sao_jax.models.norms import normalize, rms_norm, scaled_product


def rotary_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each positions.shape + [head_dim / 2], float32, for the half-split convention of Llama and Qwen."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x[i], x[i + E/2]); x is [..., heads, E], cos and sin [..., E/2]."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def pack_positions(pack_ids_BxT: jax.Array, sequence_axis: str | None = None) -> jax.Array:
    """int32 [B, T]: the place of each token in its pack, 0 for the first. Ids never fall along a row.

    pack_ids 4 4 4 7 7 9  ->  0 1 2 0 1 0

    With `sequence_axis`, of one device's part of rows cut over that mesh axis.
    """
    B, T = pack_ids_BxT.shape
    if sequence_axis is not None:  # the ids of a row are short beside its activations: every device has them all
        n, me = jax.lax.axis_size(sequence_axis), jax.lax.axis_index(sequence_axis)
        whole = pack_positions(jax.lax.all_gather(pack_ids_BxT, sequence_axis, axis=1, tiled=True))
        return jax.lax.dynamic_slice_in_dim(whole.reshape(B, n, T), me, 1, axis=1)[:, 0]
    index = jnp.broadcast_to(jnp.arange(T), (B, T))
    begins = pack_ids_BxT != jnp.pad(pack_ids_BxT[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def _weight(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    """Normal with standard deviation 1/sqrt(fan in)."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * shape[0] ** -0.5)


class Attention(nnx.Module):
    """Grouped-query attention with one fused product for queries, keys and values."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.norm = nnx.Param(jnp.ones((c.dim,)))
        self.qkv = _weight(rngs, c.dim, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim)
        self.out = _weight(rngs, c.num_heads * c.head_dim, c.dim)
        if c.qk_norm:
            self.q_norm = nnx.Param(jnp.ones((c.head_dim,)))
            self.k_norm = nnx.Param(jnp.ones((c.head_dim,)))

    def project(self, x_BxTxD, cos, sin):
        """Rotated queries [B, T, H, E], rotated keys and values [B, T, K, E] of the normalised input."""
        c = self.config
        B, T, D = x_BxTxD.shape
        y = normalize(x_BxTxD.reshape(B * T, D), c.norm_eps)
        qkv = scaled_product(y, self.norm[...], self.qkv[...], x_BxTxD.dtype).reshape(B, T, -1, c.head_dim)
        q, k, v = jnp.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        if c.qk_norm:
            q = rms_norm(q, self.q_norm[...], c.norm_eps)
            k = rms_norm(k, self.k_norm[...], c.norm_eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def merge(self, heads_BxTxHxE):
        B, T, H, E = heads_BxTxHxE.shape
        return (heads_BxTxHxE.reshape(B * T, H * E) @ self.out[...].astype(heads_BxTxHxE.dtype)).reshape(B, T, -1)

    def __call__(self, x_BxTxD, cos, sin, pack_ids_BxT=None, sequence_axis=None):
        return self.merge(attention(*self.project(x_BxTxD, cos, sin), pack_ids_BxT, sequence_axis=sequence_axis))


class Mlp(nnx.Module):
    """SwiGLU: (silu(x gate) * (x up)) down."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.norm = nnx.Param(jnp.ones((c.dim,)))
        self.gate = _weight(rngs, c.dim, c.mlp_dim)
        self.up = _weight(rngs, c.dim, c.mlp_dim)
        self.down = _weight(rngs, c.mlp_dim, c.dim)

    def __call__(self, x_BxTxD):
        B, T, D = x_BxTxD.shape
        y = normalize(x_BxTxD.reshape(B * T, D), self.config.norm_eps)
        gate = scaled_product(y, self.norm[...], self.gate[...], x_BxTxD.dtype)
        up = scaled_product(y, self.norm[...], self.up[...], x_BxTxD.dtype)
        return ((jax.nn.silu(gate) * up) @ self.down[...].astype(up.dtype)).reshape(B, T, D)


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attn = Attention(config, rngs=rngs)
        self.mlp = Mlp(config, rngs=rngs)

    def __call__(self, x_BxTxD, cos, sin, pack_ids_BxT=None, sequence_axis=None):
        x_BxTxD = x_BxTxD + self.attn(x_BxTxD, cos, sin, pack_ids_BxT, sequence_axis)
        return x_BxTxD + self.mlp(x_BxTxD)


class Decoder(nnx.Module):
    """tokens [B, T] -> final normalised hidden states [B, T, D]; `head` gives the matrix to logits."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (c.vocab_size, c.dim)) * c.dim**-0.5)
        self.layers = nnx.List([Block(c, rngs=rngs) for _ in range(c.num_layers)])
        self.norm = nnx.Param(jnp.ones((c.dim,)))
        if not c.tied:
            self.unembed = _weight(rngs, c.dim, c.vocab_size)

    def embed_tokens(self, tokens):
        return jnp.take(self.embed[...], tokens, axis=0).astype(self.config.dtype)

    def head(self) -> jax.Array:
        """[D, V], float32."""
        return self.embed[...].T if self.config.tied else self.unembed[...]

    def final_norm(self, x):
        return rms_norm(x, self.norm[...], self.config.norm_eps)

    def __call__(self, tokens_BxT, *, pack_ids=None, compute: Compute = PLAIN):
        """Hidden states [B, T, D] of the tokens; `compute` says how, and whether rows are cut over devices.

        With pack ids [B, T], which never fall along a row, each pack is a sequence of its own: positions begin at 0
        in each, and no token sees another pack. Padding is a pack of its own, the last."""
        c = self.config
        T, axis = tokens_BxT.shape[1], compute.sequence_axis
        positions = jnp.arange(T) if pack_ids is None else pack_positions(pack_ids, axis)
        if axis is not None and pack_ids is None:
            positions += jax.lax.axis_index(axis) * T
        cos, sin = rotary_angles(positions, c.head_dim, c.rope_theta)
        x = apply_blocks(self.layers, self.embed_tokens(tokens_BxT), (cos, sin, pack_ids, axis), compute)
        return self.final_norm(x)


@functools.cache
def _graph(config: ModelConfig):
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[0]


def _string_keys(tree):
    return {str(k): _string_keys(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


def init_params(config: ModelConfig, key: jax.Array) -> dict:
    """Fresh parameters as nested dicts with string keys."""
    return _string_keys(nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(params=key)))))


def bind(config: ModelConfig, params: dict) -> Decoder:
    """The module over `params`; cheap, meant to be called inside a jitted function."""
    return nnx.merge(_graph(config), params)
