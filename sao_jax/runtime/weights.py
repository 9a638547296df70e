"""Policy weights as files: what the learner publishes to other processes.

A file is written under another name and moved into place, so that one that is there is whole; its CRC-32 goes with the
announcement, so that one that has been damaged is not sampled with.
"""

import os
import pathlib
import zlib

import jax
import numpy as np
import safetensors
import safetensors.numpy


def names(params: dict) -> list[str]:
    """The leaves of a tree of parameters by path, in its order."""
    return ["/".join(str(getattr(k, "key", k)) for k in path) for path, _ in jax.tree.leaves_with_path(params)]


def save_weights(path: pathlib.Path, params: dict) -> int:
    """Writes the parameters, returns the CRC-32 of the file. OSError if the disk does not take them."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    data = safetensors.numpy.save(dict(zip(names(params), leaves, strict=True)))
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return zlib.crc32(data)


def load_weights(data: bytes, like: dict, crc32: int) -> dict:
    """Parameters of the shapes and dtypes of `like`. ValueError if a file's bytes are not what was announced."""
    if zlib.crc32(data) != crc32:
        raise ValueError("damaged weights: their checksum is not the one announced")
    try:
        found = safetensors.numpy.load(data)
    except safetensors.SafetensorError as error:
        raise ValueError(f"no weights: {error}") from None
    leaves = []
    for name, leaf in zip(names(like), jax.tree.leaves(like), strict=True):
        array = found.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ValueError(f"weights without {name} of {leaf.dtype}{list(leaf.shape)}")
        leaves.append(array)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
