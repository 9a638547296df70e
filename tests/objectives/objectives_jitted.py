"""The objectives under jit, for tests that compare numbers: op-by-op dispatch would compile each operation by itself.

What is checked on plain Python numbers and refused is tested on the functions themselves.
"""

import functools
import inspect
import types

import jax
import numpy as np

from sao_jax import objectives

STATIC = {"outside", "denominator", "estimator", "clamp", "mode", "kind", "by", "length", "axis_name"}
ON_THE_HOST = {"check_group_sizes", "band_from_offsets", "smooth_update", "smooth_update_with_kl", "interpolate"}


def jitted(f):
    """`f` under jit; lists become arrays, so that they are no trees of scalars."""
    static = STATIC & set(inspect.signature(f).parameters)
    compiled = jax.jit(f, static_argnames=tuple(static))

    @functools.wraps(f)
    def call(*args, **kwargs):
        args, kwargs = jax.tree.map(
            lambda x: np.asarray(x) if isinstance(x, list) else x, (args, kwargs), is_leaf=lambda x: type(x) is list
        )
        return compiled(*args, **kwargs)

    return call


fast = types.SimpleNamespace(
    **{name: jitted(getattr(objectives, name)) for name in objectives.__all__ if name not in ON_THE_HOST}
)
