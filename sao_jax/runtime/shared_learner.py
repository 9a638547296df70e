"""A learner whose mesh spans several processes: the leader's calls are told to the followers, who make them as well.

A learner is a function of its calls and rows, so that is all there is to tell. Arrays travel as safetensors.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from sao_jax.data.rows import blank_row
from sao_jax.learner.learner import Learner
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.devices import data_mesh
from sao_jax.runtime.hosts import Follower, Leader, leave_jax

BLAME_S = 5.0  # an error is that of another host if the leader ends this process in this time


def pack(trees: Sequence[Any]) -> bytes:
    """Leaves of trees whose structure the other side knows."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(trees)]
    return safetensors.numpy.save({f"{number:08d}": leaf for number, leaf in enumerate(leaves)})


def unpack(data: bytes, like: Any) -> Any:
    arrays = safetensors.numpy.load(data)
    pairs = zip(sorted(arrays), jax.tree.leaves(like), strict=True)
    leaves = [arrays[name].reshape(np.shape(leaf)) for name, leaf in pairs]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


class SharedLearner:
    """The leader's learner. What changes it, or needs all hosts, is told first; the rest is the learner's own."""

    def __init__(self, learner: Learner, leader: Leader):
        self._learner, self._tell = learner, leader.tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def put(self, *rows: dict[str, np.ndarray]) -> None:
        self._tell("put", pack(rows), rows=len(rows))
        self._learner.put(*rows)

    def accumulate(self) -> None:
        self._tell("accumulate")
        self._learner.accumulate()

    def update(self) -> dict[str, jax.Array]:
        self._tell("update")
        return self._learner.update()

    def score(self, trajectories: Sequence[Sequence[dict]]) -> dict[str, jax.Array]:
        self._tell("score", pack(trajectories), rows=[len(rows) for rows in trajectories])
        return self._learner.score(trajectories)

    def warm_up(self, row: dict, *, preheat: bool, check: Callable[[], None]) -> list[str]:
        self._tell("warm_up", pack(row), preheat=preheat)
        return self._learner.warm_up(row, preheat=preheat, check=check)

    def start(self, policy: dict) -> None:
        self._tell("start", pack(policy))
        self._learner.start(policy)

    def load(self, state: dict, version: int) -> None:
        self._tell("load", pack(state), version=version)
        self._learner.load(state, version)

    def published_policy(self) -> dict:
        if self._learner.programs.shard_params:
            self._tell("published_policy")
        return self._learner.published_policy()

    def whole_state(self) -> dict:
        if self._learner.programs.shard_params:
            self._tell("whole_state")
        return self._learner.whole_state()

    @property
    def critic_only(self) -> bool:
        return self._learner.critic_only

    @critic_only.setter
    def critic_only(self, value: bool) -> None:
        if value != self._learner.critic_only:
            self._tell("critic_only", value=value)
            self._learner.critic_only = value

    @property
    def watch(self) -> Callable:
        return self._learner.watch

    @watch.setter
    def watch(self, watch: Callable) -> None:
        self._learner.watch = watch


class Share:
    """A follower's learner: makes the calls it is told to make."""

    def __init__(self, config: RunConfig):
        from sao_jax.runtime.run import family_and_context, make_learner

        self._config = config
        self._family, self._context = family_and_context(config)
        self._learner = make_learner(config, self._family, self._context, data_mesh(config.devices))
        self._row = blank_row(self._learner.layout.length)

    def obey(self, message: dict, payload: bytes) -> None:
        learner, kind = self._learner, message["kind"]
        if kind == "put":
            learner.put(*unpack(payload, [self._row] * message["rows"]))
        elif kind == "accumulate":
            learner.accumulate()
        elif kind == "update":
            learner.update()
        elif kind == "score":
            learner.score(unpack(payload, [[self._row] * count for count in message["rows"]]))
        elif kind == "warm_up":
            learner.warm_up(unpack(payload, self._row), preheat=message["preheat"])
        elif kind == "critic_only":
            learner.critic_only = message["value"]
        elif kind == "start":
            learner.start(unpack(payload, learner.programs.abstract["policy"]))
        elif kind == "load":
            learner.load(unpack(payload, learner.programs.abstract), message["version"])
        elif kind in ("published_policy", "whole_state"):
            getattr(learner, kind)()
        elif kind == "warm_start":
            self._warm_start()
        else:
            raise ValueError(f"unknown message {kind!r}")

    def finish(self) -> None:
        """Waits for all calls."""
        jax.block_until_ready(self._learner.state)

    def _warm_start(self) -> None:
        from sao_jax.runtime.warm_start import warm_start

        learner = self._learner
        warm_start(
            self._config, learner.programs.config, self._family, learner.state["policy"], self._context, learner.mesh,
            report=lambda step, loss: None, check=lambda: None,
        )  # fmt: skip


def share(follower: Follower, requested: Callable[[], int]) -> int:
    """Follows until the leader ends the run; returns the exit code it ended with."""
    learner: Share | None = None
    for message, payload in follower.commands(requested):
        if message["kind"] == "learner":
            learner = Share(RunConfig.from_json(message["config"]))
            continue
        try:
            learner.obey(message, payload)
        except (ValueError, RuntimeError):
            time.sleep(BLAME_S)
            raise
    if learner is not None:
        learner.finish()
    follower.leave()
    leave_jax()
    return follower.exit_code
