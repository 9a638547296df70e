"""The value model: the policy's architecture and starting weights, its own copy of them, and a scalar head.

    values of prefixes:  output[t] = w . hidden[t] + b = value of the prefix that ends with token t
    V_t (value of the prefix before token t, in which token t is chosen) = output[t - 1]

Letters: B rows, T positions, D width.
"""

import dataclasses
import fnmatch
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sao_jax.models.compute import PLAIN, Compute
from sao_jax.models.config import ModelConfig
from sao_jax.models.decoder import bind


def init_critic(config: ModelConfig, policy_params: dict) -> dict:
    """{"trunk": copy of the policy without its output head, "head": {"w": [D, 1], "b": [1]}}.

    The head starts at zero, so every initial value is exactly 0 and the first advantages are the returns. It gets a
    gradient at the first step; the trunk, whose gradient is a multiple of w, from the second on.

    The arrays are copied: policy and critic are donated to their own updates.
    """
    trunk = {name: value for name, value in policy_params.items() if name != "unembed"}
    head = {"w": jnp.zeros((config.dim, 1), jnp.float32), "b": jnp.zeros((1,), jnp.float32)}
    return {"trunk": jax.tree.map(lambda x: jnp.array(x, copy=True), trunk), "head": head}


def critic_outputs(
    config: ModelConfig,
    params: dict,
    tokens_BxT: jax.Array,
    *,
    pack_ids: jax.Array | None = None,
    compute: Compute = PLAIN,
) -> jax.Array:
    """float32 [B, T]; entry t is the value of the prefix that ends with token t. The head is float32.

    With pack ids [B, T] the prefix is that of t's own pack, see `Decoder`.
    """
    trunk_config = dataclasses.replace(config, tied=True)  # "tied" is how a decoder without `unembed` is spelled.
    hidden = bind(trunk_config, params["trunk"])(tokens_BxT, pack_ids=pack_ids, compute=compute)
    return (hidden.astype(jnp.float32) @ params["head"]["w"] + params["head"]["b"])[..., 0]


def prefix_values(
    outputs_BxT: jax.Array, length_B: jax.Array, *, pack_ids: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """(values [B, T], bootstrap [B]) from the critic's outputs on right-padded rows.

    values[t] = outputs[t - 1] is the value of the state in which token t is chosen; values[0] = 0, as nothing is chosen
    there. The mask over tokens then fits the values unshifted. bootstrap = outputs[length - 1], the value of the whole
    stored prefix; 0 for an empty row.

    With pack ids [B, T] the value of each pack's first token is 0, length counts the row's tokens of all packs but the
    padding, and bootstrap is [B, T]: at every token of a pack the output of that pack's last token, 0 on padding.
    """
    values = jnp.pad(outputs_BxT[:, :-1], ((0, 0), (1, 0)))
    if pack_ids is not None:
        return _packed_values(outputs_BxT, values, length_B, pack_ids)
    last = jnp.take_along_axis(outputs_BxT, jnp.maximum(length_B - 1, 0)[:, None], axis=1)[:, 0]
    return values, jnp.where(length_B > 0, last, 0.0)


def _packed_values(outputs_BxT, shifted_BxT, length_B, pack_ids_BxT):
    T = outputs_BxT.shape[1]
    index = jnp.arange(T)
    begins = pack_ids_BxT != jnp.roll(pack_ids_BxT, 1, axis=1)
    ends = (pack_ids_BxT != jnp.roll(pack_ids_BxT, -1, axis=1)) | (index == T - 1) | (index == length_B[:, None] - 1)
    last = jax.lax.cummin(jnp.where(ends, index, T - 1), axis=1, reverse=True)
    bootstrap = jnp.take_along_axis(outputs_BxT, last, axis=1)
    values = jnp.where(begins | (index == 0), 0.0, shifted_BxT)
    return values, jnp.where(index < length_B[:, None], bootstrap, 0.0)


def matching_leaves(params: dict, patterns: Sequence[str]) -> dict:
    """A tree of bool like `params`: True where the leaf's path, such as "trunk/layers/0/attn/qkv", fits a pattern.

    Patterns are those of `fnmatch`, and `*` also spans slashes: "*/attn/*" is all attention parameters.

    Raises:
      ValueError: a pattern fits no path. A misspelled one would silently freeze nothing.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            shown = ", ".join(paths[:: max(1, len(paths) // 6)])
            raise ValueError(f"pattern {pattern!r} matches no parameter; paths are like {shown}")
    hits = [any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns) for path in paths]
    return jax.tree.unflatten(structure, hits)
