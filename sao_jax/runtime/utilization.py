"""How busy devices are, from when their calls began and ended."""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from sao_jax.runtime.trace import Trace


@dataclasses.dataclass
class BusyTime:
    """Of one device: the union of the intervals in which it ran a call with at least one live row.

    A device runs its calls in the order in which they were enqueued, so intervals are added in the order of their ends,
    and a call that was enqueued during another began when that one ended.
    """

    since: float
    _until: float = -float("inf")
    _busy: float = 0.0
    _weighted: float = 0.0

    def add(self, start: float, end: float, live: float = 1.0) -> float:
        """A call enqueued at `start` and done at `end`, with a share `live` of its rows in use; without any it is idle
        work, and none is counted. Returns when it began."""
        start, self._until = max(start, self._until), max(end, self._until)
        if live > 0.0 and end > start:
            self._busy += end - max(start, self.since)
            self._weighted += live * (end - max(start, self.since))
        return min(start, end)

    def read(self, now: float) -> tuple[float, float]:
        """(utilisation, the same weighted by live rows) since the last call."""
        seconds = now - self.since
        shares = (self._busy / seconds, self._weighted / seconds) if seconds > 0 else (float("nan"),) * 2
        self.since, self._busy, self._weighted = now, 0.0, 0.0
        return shares


class DeviceWatch:
    """Notes when enqueued calls are done, on a thread of its own, so that nothing waits for them.

        watch.enqueued(start, result, live, "burst")    # after a call that began at `start`: one of its results
        utilization, weighted = watch.read()

    `live`: shares of live rows, by device. Some calls run on the calling thread, so that they are done by the time they
    can be watched. A result may be donated to a later call before the watch has come to it; the two then count as one.
    """

    def __init__(self, devices: int, clock: Callable[[], float] = time.monotonic, trace: Trace | None = None):
        self._clock, self._trace = clock, trace
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy = [BusyTime(clock()) for _ in range(devices)]
        self._thread = threading.Thread(target=self._watch, name="device watch", daemon=True)
        self._thread.start()

    def enqueued(self, start: float, result: jax.Array, live: float | Sequence[float], name: str = "") -> None:
        self._calls.put((start, result, np.broadcast_to(live, len(self._busy)), name))

    def read(self) -> tuple[float, float]:
        """(utilisation, the same weighted by live rows) since the last call, means over devices."""
        with self._lock:
            now = self._clock()
            shares = np.array([busy.read(now) for busy in self._busy])
        return tuple(shares.mean(axis=0).tolist())

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _watch(self) -> None:
        start = None
        while (call := self._calls.get()) is not None:
            enqueued, result, live, name = call
            start = enqueued if start is None else start
            try:
                jax.block_until_ready(result)
            except RuntimeError:
                continue  # donated: whatever took it is in the queue behind it
            with self._lock:
                end = self._clock()
                for number, (busy, share) in enumerate(zip(self._busy, live.tolist(), strict=True)):
                    begun = busy.add(start, end, share)
                    if self._trace is not None:
                        self._trace.add(name, f"device {number}", begun, end, live=share)
            start = None
