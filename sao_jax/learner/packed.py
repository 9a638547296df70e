"""Rows that share rows of the device: the models see them side by side, everything else sees each by itself.

Letters: R packed rows of L tokens, P pieces at most in each, N = R * P. A piece is a row of the buffer, right-padded to
L. Only forward passes cost by the token, so only they are packed; advantages, losses and sums are computed on pieces as
on any other rows, which makes every one of them right per piece.
"""

import dataclasses

import jax
import jax.numpy as jnp

from sao_jax.models.compute import PLAIN, Compute
from sao_jax.models.config import ModelConfig
from sao_jax.models.critic import critic_outputs
from sao_jax.models.decoder import bind
from sao_jax.models.logprobs import next_token_logprobs


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How N pieces share R rows.

    pack_ids: int32 [R, L], the piece in a row that a token belongs to; padding is piece P.
    source: int32 [R, L], the place of each of the rows' tokens in the pieces [N * L].
    target: int32 [N, L], the place of each of the pieces' tokens in the rows [R * L]; own: bool [N, L], others are
      padding.
    """

    pack_ids: jax.Array
    source: jax.Array
    target: jax.Array
    own: jax.Array

    def together(self, pieces_NxL: jax.Array) -> jax.Array:
        return pieces_NxL.reshape(-1)[self.source]

    def apart(self, rows_RxL: jax.Array) -> jax.Array:
        return jnp.where(self.own, rows_RxL.reshape(-1)[self.target], 0)


def sharing(lengths_RxP: jax.Array, L: int) -> Sharing:
    """Pieces lie one after the other from the row's first token on; a piece of length 0 is none."""
    R, P = lengths_RxP.shape
    ends = jnp.cumsum(lengths_RxP, axis=1)
    starts = ends - lengths_RxP
    at = jnp.arange(L)
    pack_ids = (at[None, :, None] >= ends[:, None]).sum(-1)  # [R, L]
    piece = jnp.minimum(pack_ids, P - 1)
    within = jnp.clip(at - jnp.take_along_axis(starts, piece, axis=1), 0, L - 1)
    source = (jnp.arange(R)[:, None] * P + piece) * L + within
    target = jnp.arange(R)[:, None, None] * L + jnp.minimum(starts[..., None] + at, L - 1)
    own = at < lengths_RxP[..., None]
    return Sharing(pack_ids, source, target.reshape(-1, L), own.reshape(-1, L))


def take(buffer: dict, slots_RxP: jax.Array) -> tuple[dict, jax.Array, Sharing]:
    """(rows [N, ...], live [N], how they share) from the device's part [1, S, ...] of the buffer; slot S: no piece."""
    S, L = buffer["tokens"].shape[1:]
    live = slots_RxP < S
    rows = {k: v[0].at[slots_RxP.reshape(-1)].get(mode="clip") for k, v in buffer.items()}
    shared = sharing(jnp.where(live, rows["length"].reshape(live.shape), 0), L)
    return rows, live.reshape(-1), shared


def put(buffer: dict, slots_RxP: jax.Array, new: dict) -> dict:
    """Writes `new` fields [N, ...] to their slots."""
    at = slots_RxP.reshape(-1)
    return buffer | {k: buffer[k][0].at[at].set(x, mode="drop")[None] for k, x in new.items()}


def policy_forward(config: ModelConfig, params: dict, rows: dict, shared: Sharing, compute: Compute = PLAIN):
    """(log-prob, entropy) [N, L] of the pieces' action tokens, 0 elsewhere."""
    model, tokens = bind(config, params), shared.together(rows["tokens"])
    drawn_at = shared.together(jnp.broadcast_to(rows["temperature"][:, None], rows["tokens"].shape))
    hidden = model(tokens, pack_ids=shared.pack_ids, compute=compute)
    acts = shared.together(rows["action_mask"])
    scores = next_token_logprobs(hidden, model.head(), tokens, drawn_at, pack_ids_BxT=shared.pack_ids, live_BxT=acts)
    return tuple(shared.apart(x) for x in scores)


def critic_forward(config: ModelConfig, params: dict, rows: dict, shared: Sharing, compute: Compute = PLAIN):
    """[N, L], entry t of a piece: the value of its prefix that ends with token t."""
    tokens = shared.together(rows["tokens"])
    return shared.apart(critic_outputs(config, params, tokens, pack_ids=shared.pack_ids, compute=compute))
