"""What recorded events do to the learner. It depends on nothing else: this is all there is to a resume or a replay."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sao_jax.data.rows import make_rows
from sao_jax.data.trajectory import Trajectory
from sao_jax.runtime.loop_metrics import LoopMetrics
from sao_jax.runtime.pilot import Pilot
from sao_jax.runtime.run import Run


class Effects:
    """The learner's side of a loop. `check()` may raise to stop it."""

    def __init__(self, run: Run, metrics: LoopMetrics, check: Callable[[], None]):
        self.run, self.config, self.metrics = run, run.config, metrics
        self._check = check
        self.updates = 0  # ended batches, critic-only ones included
        self.published = 0  # newest version given to the sampler, which may still be on its way to its processes
        self._boundary = (0, 0)  # position of the newest update applied, and updates then
        self._schedule: list[tuple[str, Any]] = []  # events to be written with the next transaction
        self._rows: dict[int, Trajectory] = {}  # arrivals that are durable and not yet applied
        self._pilot = Pilot(run)

    def close(self) -> None:
        """Waits for the device calls that are being watched: a thread that is in one when Python ends aborts it."""
        self._pilot.close()

    def _version_of(self, updates: int) -> int:
        return max(0, updates - (self.config.num_critic_only_steps or 0))

    def _critic_only(self, updates: int) -> bool:
        return updates < (self.config.num_critic_only_steps or 0)

    def apply(self, position: int, kind: str, payload: Any) -> None:
        """Does what an event says. The learner's state depends on nothing else."""
        learner = self.run.learner
        if kind == "arrive":
            rollout = payload["rollout"]
            t = self._rows.pop(rollout, None) or self.run.trajectory(rollout)
            learner.put(*self.rows(t, payload["advantage"], max(0, learner.version - t.oldest_version)))
        elif kind == "accumulate":
            learner.accumulate()
        elif kind == "update":
            sums = learner.update()
            self.updates += 1
            learner.critic_only = self._critic_only(self.updates)
            self._boundary = (position, self.updates)
            self.metrics.updated(sums, learner.version, critic_only=payload["critic_only"])
            self._after_update(position, payload)

    def _after_update(self, position: int, payload: dict) -> None:
        self._pilot.updated()
        if not payload["critic_only"] and self.run.learner.version % self.config.publish_every == 0:
            self.publish()
            self.metrics.published()
        if self.updates % self.config.checkpoint_every == 0:
            self.save(position)

    def publish(self) -> None:
        """Gives the learner's policy to the sampler, from the next burst on."""
        learner = self.run.learner
        self.published = learner.version
        self.run.agents.publish(learner.published_policy(), learner.version)
        self._schedule.append(("publish", {"version": learner.version}))

    def save(self, position: int) -> None:
        self.metrics.flush()  # a resume from this checkpoint does not compute the update's line again
        self.run.save(position=position, updates=self.updates, stage="rl", drift=self.metrics.drift)

    def save_at_boundary(self) -> None:
        """Saves the state of the last boundary, unless it has moved since (a critic that steps on arrivals).

        Between boundaries gradients are only summed, so the parameters still are those of the boundary; arrivals and
        gradient calls since then are durable events, applied again at a resume.
        """
        learner = self.run.learner
        if learner.empty or self.config.critic_update != "arrival":
            position, updates = self._boundary
            self.run.save(position=position, updates=updates, stage="rl", drift=self.metrics.drift)

    def _settle_drift(self) -> None:
        """SPO's tracker goes by how far the policy has moved, the newest update included, which is waited for."""
        if self.config.baseline == "spo":
            self.metrics.flush()

    def rows(self, t: Trajectory, advantage: float = 0.0, stale: int = 0) -> list[dict[str, np.ndarray]]:
        return make_rows(
            t,
            length=self.run.learner.layout.length,
            steps_per_segment=self.config.segment_steps,
            lambda_=self.config.policy_lambda(t.num_action_tokens),
            advantage=advantage,
            staleness=stale,
        )

    def reapply(
        self, position: int, updates: int, observe: Callable = lambda event: None, until: float = float("inf")
    ) -> list[int]:
        """Applies the learner's events after `position` in order; returns the rollouts in the unfinished batch.

        `observe` is shown every event, and sees the learner as it was when the event was recorded.
        """
        self.updates, self._boundary = updates, (position, updates)
        self.run.learner.critic_only = self._critic_only(updates)
        arrived: list[int] = []
        for event in self.run.ledger.events(after=position):
            if event.position > until:
                break
            self._check()
            observe(event)
            if event.kind not in ("arrive", "accumulate", "update"):
                continue
            if event.kind == "arrive":
                t = self.run.trajectory(event.payload["rollout"])
                self.metrics.arrived(t, max(0, self._version_of(self.updates) - t.oldest_version))
                self._rows[t.rollout] = t
                arrived.append(t.rollout)
            if event.kind == "update":
                # What these updates have cost was paid when they were recorded.
                self.run.clock.restore(event.payload["clock_s"])
                self._settle_drift()
            self.apply(event.position, event.kind, event.payload)
            if event.kind == "update":
                arrived = []
        return arrived
