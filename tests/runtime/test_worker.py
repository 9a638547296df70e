"""What a rollout process does with the messages of the run."""

import threading
import time
import types
import zlib
from multiprocessing.connection import Connection

import numpy as np
import pytest

from sao_jax.rollout.agents import Failure
from sao_jax.runtime import wire
from sao_jax.runtime.router import Reading
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


def test_a_process_that_sends_all_the_time_says_how_busy_and_how_hot_it_is():
    def collect():
        time.sleep(0.01)
        return [Failure(0, 0, "again")]

    connection, theirs = wire.pair()
    worker = object.__new__(Worker)
    worker._connection, worker._live, worker._device = Connection(theirs.detach()), False, 0
    worker._began = worker._status_at = time.monotonic()
    worker._watch = types.SimpleNamespace(read=lambda: (0.5, 0.25))
    worker._source = lambda seconds: [Reading(50.0 + seconds, 0.5)]
    engine = types.SimpleNamespace(warm_up=lambda: None)
    worker._agents = types.SimpleNamespace(engine=engine, running=1, collect=collect, dispatch=lambda: True)
    thread = threading.Thread(target=worker.go)
    thread.start()
    heard, deadline = [], time.monotonic() + 20.0
    while len(heard) < 3:
        assert time.monotonic() < deadline
        message, _ = wire.receive(connection)
        if message["kind"] == "status":
            heard.append(message["temperature_c"])
    wire.send(connection, "end")
    thread.join()
    assert heard[2] > heard[1] > heard[0]
    connection.close()
    worker._connection.close()
