"""How busy devices are, from when their calls began and ended."""

import dataclasses


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

    def add(self, start: float, end: float, live: float = 1.0) -> None:
        """A call enqueued at `start` and done at `end`, with a share `live` of its rows in use; without any it is idle
        work, and none is counted."""
        start, self._until = max(start, self._until), max(end, self._until)
        if live > 0.0 and end > start:
            self._busy += end - max(start, self.since)
            self._weighted += live * (end - max(start, self.since))

    def read(self, now: float) -> tuple[float, float]:
        """(utilisation, the same weighted by live rows) since the last call."""
        seconds = now - self.since
        shares = (self._busy / seconds, self._weighted / seconds) if seconds > 0 else (float("nan"),) * 2
        self.since, self._busy, self._weighted = now, 0.0, 0.0
        return shares
