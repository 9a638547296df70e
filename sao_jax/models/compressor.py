"""Compression of state vectors: a mixture-of-experts projection to fewer numbers, and back.

With router logits r(x), p = softmax(r(x)), S(x) the k experts of largest p and g_e = p_e / sum_{S} p:

    encode:  z = sum_{e in S(x)} g_e (x W_e + a_e)        [D] -> [C]
    decode:  y = sum_{e in S(x)} g_e (z U_e + b_e)        [C] -> [D]

What is kept of x is its `Code`: z, the numbers of its experts and their weights. With one expert this is a linear
projection with a decoder, so the baselines are parameters of the same module: `pca_params` in closed form,
`truncation_params`, and whatever training makes of either.

Letters: N rows, D width of a state, C width of its code, E experts, k experts per row.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

KINDS = ("moe", "linear", "pca", "truncation")


@dataclasses.dataclass(frozen=True)
class CompressorConfig:
    """Sizes of a compressor: `width_in` numbers become `width`, by `top_k` of `experts` projections."""

    width_in: int = 1024
    width: int = 256
    experts: int = 4
    top_k: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"compressor {field.name} is {getattr(self, field.name)}; it must be at least 1")
        if self.width > self.width_in:
            raise ValueError(f"compressor width {self.width} is larger than the {self.width_in} it compresses")
        if self.top_k > self.experts:
            raise ValueError(f"compressor top_k {self.top_k} is larger than its {self.experts} experts")
        if self.experts > 256:
            raise ValueError(f"compressor has {self.experts} experts; at most 256 fit the byte that is kept")

    @property
    def code_bytes(self) -> int:
        """Bytes that are kept of one vector: see `Compressor.compact`."""
        gates = 4 * self.top_k if self.top_k > 1 else 0
        return 4 * self.width + (self.top_k if self.experts > 1 else 0) + gates


class Code(NamedTuple):
    """What is kept of a vector: float32 [..., C], integer [..., k], float32 [..., k]."""

    latent: jax.Array
    experts: jax.Array
    gates: jax.Array


class Compressor(nnx.Module):
    """Rows [N, D] to codes and back. All experts are computed in one product; those not chosen weigh 0.

    That costs E / k times the operations of a dispatch, in exchange for two plain matrix products without capacity
    limits or dropped rows. E is small here.
    """

    def __init__(self, config: CompressorConfig, *, rngs: nnx.Rngs):
        c = self.config = config

        def weight(*shape, fan_in):
            return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5)

        self.router = weight(c.width_in, c.experts, fan_in=c.width_in)
        self.router_bias = nnx.Param(jnp.zeros((c.experts,)))
        self.encode_w = weight(c.experts, c.width_in, c.width, fan_in=c.width_in)
        self.encode_b = nnx.Param(jnp.zeros((c.experts, c.width)))
        self.decode_w = weight(c.experts, c.width, c.width_in, fan_in=c.width)
        self.decode_b = nnx.Param(jnp.zeros((c.experts, c.width_in)))

    def route(self, x_NxD):
        """(probabilities [N, E], experts [N, k], gates [N, k]), float32.

        The gates sum to 1. The sum that they are divided by counts as a constant in the derivative, as in the Switch
        Transformer's p_e * f_e: else the router of a k = 1 mixture, whose only gate is 1, would learn nothing.
        """
        logits = x_NxD.astype(jnp.float32) @ self.router[...] + self.router_bias[...]
        probs = jax.nn.softmax(logits, axis=-1)
        top, experts = jax.lax.top_k(probs, self.config.top_k)
        return probs, experts, top / jax.lax.stop_gradient(top.sum(-1, keepdims=True))

    def _combine(self, experts_Nxk, gates_Nxk):
        """[N, E]: the gate of each expert, 0 where it is not chosen."""
        chosen = experts_Nxk[..., None] == jnp.arange(self.config.experts)
        return jnp.where(chosen, gates_Nxk[..., None], 0.0).sum(-2)

    def encode(self, x_NxD) -> tuple[Code, jax.Array]:
        """(codes, router probabilities [N, E])."""
        c, x = self.config, x_NxD.astype(jnp.float32)
        probs, experts, gates = self.route(x)
        weights = self.encode_w[...].transpose(1, 0, 2).reshape(c.width_in, -1)
        all_NxExC = (x @ weights).reshape(-1, c.experts, c.width) + self.encode_b[...]
        latent = jnp.einsum("nec,ne->nc", all_NxExC, self._combine(experts, gates))
        return Code(latent, experts, gates), probs

    def decode(self, code: Code) -> jax.Array:
        """float32 [N, D] from codes of N rows, whole or compact."""
        c = self.config
        code = self._complete(code)
        combine = self._combine(code.experts.astype(jnp.int32), code.gates)
        spread = (combine[:, :, None] * code.latent[:, None, :]).reshape(-1, c.experts * c.width)
        return spread @ self.decode_w[...].reshape(c.experts * c.width, c.width_in) + combine @ self.decode_b[...]

    def compact(self, code: Code) -> Code:
        """The code without what the configuration implies: one expert of one has number 0, one gate is 1."""
        c = self.config
        experts = code.experts.astype(jnp.uint8)
        return Code(
            code.latent,
            experts if c.experts > 1 else experts[..., :0],
            code.gates if c.top_k > 1 else code.gates[..., :0],
        )

    def _complete(self, code: Code) -> Code:
        shape = (*code.latent.shape[:-1], self.config.top_k)
        experts = code.experts if code.experts.shape[-1] else jnp.zeros(shape, jnp.uint8)
        gates = code.gates if code.gates.shape[-1] else jnp.ones(shape, jnp.float32)
        return Code(code.latent, experts, gates)

    def __call__(self, x_NxD):
        """(decoded [N, D], code, router probabilities [N, E])."""
        code, probs = self.encode(x_NxD)
        return self.decode(code), code, probs


@functools.cache
def _graph(config: CompressorConfig):
    return nnx.split(nnx.eval_shape(lambda: Compressor(config, rngs=nnx.Rngs(0))))[0]


def bind(config: CompressorConfig, params: dict) -> Compressor:
    """The module over `params`; cheap, meant to be called inside a jitted function."""
    return nnx.merge(_graph(config), params)


def init_params(config: CompressorConfig, key: jax.Array) -> dict:
    """Fresh random parameters."""
    return nnx.to_pure_dict(nnx.state(Compressor(config, rngs=nnx.Rngs(params=key))))


# -- losses ------------------------------------------------------------------------------------------------------------


def reconstruction_loss(x_NxD, decoded_NxD, mask_N) -> tuple[jax.Array, jax.Array]:
    """(sum over live rows of mean_d (x - y)^2, live rows); other rows may hold anything."""
    error = jnp.where(mask_N[:, None], x_NxD - decoded_NxD, 0.0)
    return jnp.square(error).mean(-1).sum(), mask_N.sum()


def balance_loss(probs_NxE, experts_Nxk, mask_N, *, axis_name: str | None = None) -> tuple[jax.Array, jax.Array]:
    """(sum, live rows) of the load-balance loss; their quotient is

        E * sum_e f_e P_e,   f_e = share of all choices that fell on e (a constant), P_e = mean router probability,

    1 where either is uniform, E where all rows go to one expert with certainty. Fedus et al., "Switch Transformers",
    2021, equations 4 to 6; for k > 1 as in Lepikhin et al., "GShard", 2020.

    f is that of all devices if `axis_name` is given; sum and count are this device's.
    """
    E = probs_NxE.shape[1]
    chosen = (experts_Nxk[..., None] == jnp.arange(E)) & mask_N[:, None, None]
    load_E, rows = chosen.sum((0, 1)).astype(jnp.float32), mask_N.sum()
    everywhere = (load_E, rows) if axis_name is None else jax.lax.psum((load_E, rows), axis_name)
    f_E = jax.lax.stop_gradient(everywhere[0]) / jnp.maximum(everywhere[1] * experts_Nxk.shape[1], 1)
    return E * (f_E * jnp.where(mask_N[:, None], probs_NxE, 0.0).sum(0)).sum(), rows


# -- parameters without training ---------------------------------------------------------------------------------------


def truncation_params(config: CompressorConfig) -> dict:
    """Keeps the first C numbers of each row; the others decode to 0."""
    keep = jnp.eye(config.width_in, config.width, dtype=jnp.float32)
    return _linear(config, jnp.zeros(config.width_in), keep)


def pca_params(config: CompressorConfig, rows_NxD: jax.Array) -> dict:
    """The linear projection of least squared error on `rows`: their mean and first C principal components."""
    rows = jnp.asarray(rows_NxD, jnp.float32)
    mean = rows.mean(0)
    centred = rows - mean
    _, vectors = jnp.linalg.eigh(centred.T @ centred / rows.shape[0])  # ascending eigenvalues
    return _linear(config, mean, vectors[:, ::-1][:, : config.width])


def _linear(config, mean_D, basis_DxC) -> dict:
    if (config.experts, config.top_k) != (1, 1):
        raise ValueError(f"a linear projection has one expert, not {config.experts}")
    return {
        "router": jnp.zeros((config.width_in, 1)),
        "router_bias": jnp.zeros(1),
        "encode_w": basis_DxC[None],
        "encode_b": -(mean_D @ basis_DxC)[None],
        "decode_w": basis_DxC.T[None],
        "decode_b": mean_D[None],
    }


def mixture_params(config: CompressorConfig, key: jax.Array, rows_NxD: jax.Array, *, sweeps: int = 10) -> dict:
    """A mixture to start training from: rows are clustered (k-means), an expert begins as the PCA of its cluster.

    The router begins as the choice of the nearest centre: |x - c_e|^2 = |x|^2 - 2 x.c_e + |c_e|^2, in units of the mean
    squared distance to the nearest one. A cluster of few rows gets the components of all rows, as the directions that
    its own do not span are unknown.
    """
    rows = jnp.asarray(rows_NxD, jnp.float32)
    E, D, C = config.experts, config.width_in, config.width
    everything = pca_params(CompressorConfig(D, C, 1, 1), rows)
    centres = jax.random.choice(key, rows, (E,), replace=False)

    def distances(centres):
        return jnp.square(rows).sum(1)[:, None] - 2 * rows @ centres.T + jnp.square(centres).sum(1)

    for _ in range(sweeps):
        nearest = jax.nn.one_hot(distances(centres).argmin(1), E)
        sums, counts = nearest.T @ rows, nearest.sum(0)[:, None]
        centres = jnp.where(counts > 0, sums / jnp.maximum(counts, 1), centres)
    near = distances(centres)
    unit = jnp.maximum(near.min(1).mean(), 1e-6)
    members = near.argmin(1)
    parts = []
    for e in range(E):
        own = rows[members == e]
        if own.shape[0] >= 2 * C:
            parts.append(pca_params(CompressorConfig(D, C, 1, 1), own))
        else:
            parts.append(everything)
    stacked = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves), *[{k: p[k] for k in p if "code" in k} for p in parts]
    )
    return stacked | {"router": 2 * centres.T / unit, "router_bias": -jnp.square(centres).sum(1) / unit}


def start_params(kind: str, config: CompressorConfig, key: jax.Array, rows_NxD: jax.Array) -> dict:
    """Parameters of a kind in `KINDS` from sample rows; "moe" and "linear" are meant to be trained further.

    Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown compressor {kind!r}; allowed: {', '.join(KINDS)}")
    if kind == "truncation":
        return truncation_params(config)
    return mixture_params(config, key, rows_NxD) if kind == "moe" else pca_params(config, rows_NxD)


def config_of(kind: str, config: CompressorConfig) -> CompressorConfig:
    """The configuration of a kind at the same widths: all but "moe" have one expert."""
    return config if kind == "moe" else dataclasses.replace(config, experts=1, top_k=1)
