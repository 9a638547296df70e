"""What a rollout process does with the messages of the run."""

import types
import zlib

import numpy as np
import pytest

from sao_jax.runtime import wire
from sao_jax.runtime.weights import save_weights
from sao_jax.runtime.worker import Worker


def test_weights_announced_before_the_older_ones_are_committed_are_kept(tmp_path):
    ours, theirs = wire.pair()
    worker, used = object.__new__(Worker), []
    worker._connection, worker._prepared, worker._like = ours, {}, {"a": np.zeros(2, np.float32)}
    engine = types.SimpleNamespace(publish=lambda params, version: used.append((version, float(params["a"][0]))))
    worker._agents = types.SimpleNamespace(engine=engine)
    for version in (5, 6):
        path = tmp_path / str(version)
        crc32 = save_weights(path, {"a": np.full(2, version, np.float32)})
        assert crc32 == zlib.crc32(path.read_bytes())
        worker._obey({"kind": "prepare", "version": version, "path": str(path), "crc32": crc32}, b"")
    for version in (5, 6):
        worker._obey({"kind": "commit", "version": version}, b"")
    assert used == [(5, 5.0), (6, 6.0)]
    with pytest.raises(ValueError, match="was not prepared"):
        worker._obey({"kind": "commit", "version": 6}, b"")
    assert not worker._prepared
    ours.close()
    theirs.close()
