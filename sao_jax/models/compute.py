"""How a forward pass is carried out; never what it computes, so no checkpoint and no model configuration knows it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

REMAT = ("none", "block", "dots", "offload")
_INPUT = "block_input"


@dataclasses.dataclass(frozen=True)
class Compute:
    """Memory, time and compilation of a decoder's pass over whole rows; results are equal to rounding.

    Attributes:
      remat: what the backward pass finds in memory. "none": every activation. "block": the input of each block, from
        which the block is computed again. "dots": the results of the weight products as well (not those of
        attention, which are quadratic in the length). "offload": the input of each block, in the host's memory.
      scan_layers: one loop over stacked parameters instead of one program part per block: compiled once whatever the
        depth, at the cost of a copy of the parameters. On CPU any remat does it too.
      sequence_axis: the mesh axis that rows are cut over, in order and in equal parts, inside `shard_map`; None: whole.
    """

    remat: str = "none"
    scan_layers: bool = False
    sequence_axis: str | None = None

    def __post_init__(self):
        if self.remat not in REMAT:
            raise ValueError(f"remat is {self.remat!r}; allowed: {', '.join(REMAT)}")


PLAIN = Compute()


def check_backend(compute: Compute) -> None:
    """Raises ValueError where the default backend cannot do it."""
    if compute.remat == "offload" and jax.default_backend() not in ("gpu", "tpu"):
        raise ValueError(
            f"remat offload moves activations to the host; backend {jax.default_backend()} has no memory apart from"
            " it: use none, block or dots"
        )


def apply_blocks(blocks, x_BxTxD: jax.Array, args: tuple, compute: Compute) -> jax.Array:
    """block(x, *args) for one block after the other; all blocks are of one shape."""
    check_backend(compute)
    if compute.remat == "none" and not compute.scan_layers:
        for block in blocks:
            x_BxTxD = block(x_BxTxD, *args)
        return x_BxTxD

    # On CPU XLA merges what is computed again with what was computed first, unless a loop parts them.
    looped = compute.scan_layers or jax.default_backend() == "cpu"
    parts = [nnx.split(block) for block in blocks]
    graph = parts[0][0]

    def run(x, state):
        return nnx.merge(graph, state)(checkpoint_name(x, _INPUT), *args)

    if compute.remat != "none":
        run = jax.checkpoint(run, policy=_policy(compute.remat), prevent_cse=not looped)
    if looped:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(state for _, state in parts))
        return jax.lax.scan(lambda x, state: (run(x, state), None), x_BxTxD, stacked)[0]
    return functools.reduce(run, (state for _, state in parts), x_BxTxD)


def _policy(remat: str):
    policies = jax.checkpoint_policies
    if remat == "block":
        return policies.nothing_saveable
    if remat == "dots":
        return policies.dots_with_no_batch_dims_saveable
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
