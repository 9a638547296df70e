"""Rollout processes as Ray actors: real workers on a cluster of this machine."""

import os
import signal
import time
import zlib

import jax
import numpy as np
import pytest
from helpers import MODEL_FLAGS, Tiny

from sao_jax.data.trajectory import Trajectory
from sao_jax.rollout.agents import Failure
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.run import random_policy
from sao_jax.runtime.workers import Workers

ray = pytest.importorskip("ray", reason="needs pip install -e '.[ray]'")


@pytest.fixture
def workers(tmp_path, monkeypatch):
    from sao_jax.runtime.ray_links import RayBackend

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = RunConfig(**MODEL_FLAGS, task="helpers:Tiny", workers=2, slots=4, backend="ray", worker_timeout=30.0)
    notes = []
    made = Workers(config, Tiny(), 32, tmp_path, RayBackend(2, gpus=0), note=notes.append)
    made.notes = notes
    made.params = jax.tree.map(np.asarray, random_policy(config, Tiny()))
    yield made
    made.close()
    ray.shutdown()


def until(workers, holds, seconds=120.0):
    ended, deadline = [], time.monotonic() + seconds
    while not holds(ended):
        assert time.monotonic() < deadline, f"not within {seconds} s; notes: {workers.notes}"
        ended += workers.collect(wait=0.05)
    return ended


def test_a_damaged_file_is_not_kept_for_the_next_time(tmp_path, monkeypatch):
    from sao_jax.runtime.ray_links import RayBackend

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "put", bytes)
    backend, path = RayBackend(2, gpus=0), tmp_path / "1.safetensors"
    crc32 = zlib.crc32(b"weights")
    path.write_bytes(b"weightz")
    assert backend.stored(path, crc32) == b"weightz"
    path.write_bytes(b"weights")
    assert backend.stored(path, crc32) == b"weights"
    path.write_bytes(b"weightz")
    assert backend.stored(path, crc32) == b"weights", "put there once"


@pytest.mark.slow
def test_actors_sample_swap_weights_and_are_replaced_when_they_die(workers):
    workers.publish(workers.params, 0)
    until(workers, lambda _: workers.free == 4)
    for i in range(4):
        workers.start("train", i, rollout=i, seed=1)
    ended = until(workers, lambda ended: len(ended) == 4)
    assert sorted(t.rollout for t in ended) == [0, 1, 2, 3]
    assert all(isinstance(t, Trajectory) and set(t.version[t.action_mask]) == {0} for t in ended)

    workers.publish(workers.params, 1)
    until(workers, lambda _: {p.version for p in workers._processes} == {1})
    workers.start("train", 4, rollout=4, seed=1)
    (t,) = until(workers, lambda ended: ended)
    assert set(t.version[t.action_mask]) == {1}, "weights came through the object store"

    pids = {e["name"]: int(e["where"].split()[-1]) for e in workers.describe()}
    assert os.getpid() not in pids.values()
    for i in range(5, 9):
        workers.start("train", i, rollout=i, seed=1)
    victim = next(a.process.name for a in workers._attempts.values())
    os.kill(pids[victim], signal.SIGKILL)
    begun = time.monotonic()
    ended = until(workers, lambda ended: len(ended) == 4)
    failed = [x for x in ended if isinstance(x, Failure)]
    assert {f"worker {victim}"} == {f.reason.split(":")[0] for f in failed}, "the fault did happen"
    assert any("is replaced" in note for note in workers.notes)
    assert time.monotonic() - begun < 20.0
    until(workers, lambda _: workers.free == 4)
    assert {p.version for p in workers._processes} == {1}, "the new one samples with the weights in use"
