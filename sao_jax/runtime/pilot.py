"""Measures how busy devices are during a run, and sets how many attempts are under way at once."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from sao_jax.runtime.concurrency import Control, Level, Reading, decide
from sao_jax.runtime.run import Run
from sao_jax.runtime.utilization import DeviceWatch

DECISION_S = 2.0  # between two readings
QUEUE_UPDATES = 2.0  # a finished trajectory may wait this many times the updates that the staleness bound allows


class Pilot:
    """The controller of `concurrency`, with its measurements. Without `--concurrency auto` it only measures.

    Attributes:
      level: attempts that may be under way.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic):
        config = run.config
        self._run, self._clock = run, clock
        self._watch = DeviceWatch(len(run.mesh.local_devices), clock, run.trace)
        self._control = None
        self.level = Level(config.slots if config.concurrency in (None, "auto") else config.concurrency)
        if config.concurrency == "auto":
            self._control = Control(highest=config.slots, target=config.target_utilization)
            self.level = Level(max(1, config.slots // 4))
        self._updated_at: float | None = None
        self._update_s = math.inf
        self._decided_at = clock()
        run.agents.watched(self._watch.enqueued)
        run.learner.watch = self._watch.enqueued

    @property
    def free(self) -> int:
        """Attempts that may be started."""
        return min(self._run.agents.free, int(self.level) - self._run.agents.running)

    def updated(self) -> None:
        """An update was enqueued."""
        now = self._clock()
        if self._updated_at is not None:
            seconds = now - self._updated_at
            self._update_s = seconds if math.isinf(self._update_s) else 0.8 * self._update_s + 0.2 * seconds
        self._updated_at = now

    def decide(self, room: int, queue_age_s: float, *, at_once: bool = False) -> dict[str, Any] | None:
        """Now and then a reading and, under --concurrency auto, a decision; as the payload of an event.

        The event holds all that the decision depends on, so that a recorded run can be decided again.
        """
        if self._clock() - self._decided_at < DECISION_S and not at_once:
            return None
        self._decided_at = self._clock()
        here, elsewhere = self._watch.read(), self._run.agents.utilization()
        devices = [here] * self._run.mesh.size + elsewhere
        utilization, weighted = (statistics.fmean(shares) for shares in zip(*devices, strict=True))
        event = {"utilization": utilization, "utilization_slots": weighted, "queue_age_s": queue_age_s, "room": room}
        # How many attempts run is seen by the devices that sample.
        sampling = statistics.fmean(share for share, _ in elsewhere) if elsewhere else utilization
        if self._control is not None:
            limit = QUEUE_UPDATES * (self._run.config.max_staleness + 1) * self._update_s
            control = dataclasses.replace(self._control, max_queue_age_s=limit)
            self.level = decide(control, self.level, Reading(sampling, queue_age_s, room))
            # JSON has no infinity: until the second update there is no limit.
            event |= {"sampling": sampling, "queue_limit_s": limit if math.isfinite(limit) else None}
        return event | {"concurrency": int(self.level), "reason": self.level.reason}

    def close(self) -> None:
        self._watch.close()
