"""Parameters on a mesh: replicated, or cut along one axis and gathered for each use.

Inside `shard_map` a replicated leaf is made device-varying before it is differentiated, so its gradient stays a
per-device sum, kept in an accumulator with a leading device axis and reduced once per update. A cut leaf is gathered
inside the loss; the transpose of the gather sums and scatters its gradient, so that accumulator has the shape of the
parameter itself. Both rules live here so that no gradient is summed twice or not at all.

A mesh may span the devices of several processes. Each process then makes the same calls with the same host arrays, and
reads its own devices only.
"""

import jax
import jax.numpy as jnp
import numpy as np

P = jax.P
AXIS = "data"


def param_specs(params, mesh, *, shard: bool):
    """A PartitionSpec per leaf: the first axis the mesh divides is cut when `shard`, everything else replicated."""
    size = mesh.shape[AXIS]

    def spec(leaf):
        if shard and size > 1:
            for axis, extent in enumerate(leaf.shape):
                if extent >= 2 * size and extent % size == 0:
                    return P(*([None] * axis + [AXIS]))
        return P()

    return jax.tree.map(spec, params)


def _cut_axis(spec) -> int | None:
    return next((axis for axis, name in enumerate(spec) if name == AXIS), None)


def _map(function, specs, *trees):
    return jax.tree.map(function, specs, *trees, is_leaf=lambda x: isinstance(x, P))


def localize(params, specs):
    """What a loss is differentiated by: replicated leaves become device-varying, cut leaves are left as they are."""
    return _map(
        lambda spec, x: x if _cut_axis(spec) is not None else jax.lax.pcast(x, AXIS, to="varying"),
        specs,
        params,
    )


def gather(params, specs):
    """Whole parameters from localized ones."""

    def whole(spec, x):
        axis = _cut_axis(spec)
        return x if axis is None else jax.lax.all_gather(x, AXIS, axis=axis, tiled=True)

    return _map(whole, specs, params)


def accumulator_specs(specs):
    return _map(lambda spec: P(AXIS) if _cut_axis(spec) is None else spec, specs)


def zero_accumulator(params, specs, devices: int):
    return _map(
        lambda spec, x: jnp.zeros((devices, *x.shape) if _cut_axis(spec) is None else x.shape, jnp.float32),
        specs,
        params,
    )


def accumulate(total, gradients, specs):
    """Inside shard_map: adds gradients with respect to localized parameters."""
    return _map(lambda spec, t, g: t + (g[None] if _cut_axis(spec) is None else g), specs, total, gradients)


def reduce(total, specs):
    """Outside shard_map: the sum over devices, one array per parameter."""
    return _map(lambda spec, t: t.sum(0) if _cut_axis(spec) is None else t, specs, total)


def shardings(specs, mesh):
    return _map(lambda spec: jax.NamedSharding(mesh, spec), specs)


def place(tree, sharding):
    """Arrays on the mesh, from values that every process has.

    `jax.device_put` would compare the values between processes, with a collective for each.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def pieces(x):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(pieces, tree)


def own_mesh(mesh):
    """The part of a mesh that this process has."""
    return mesh.local_mesh if mesh.is_multi_process else mesh


def own_copy(tree, mesh):
    """Replicated arrays as arrays of this process's devices alone, which other programs of this process can read."""
    if not mesh.is_multi_process:
        return tree
    own = jax.NamedSharding(own_mesh(mesh), P())

    def part(x):
        return jax.make_array_from_single_device_arrays(x.shape, own, [piece.data for piece in x.addressable_shards])

    return jax.tree.map(part, tree)
