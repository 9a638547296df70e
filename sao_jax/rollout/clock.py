"""The time that a run is charged for."""

import contextlib
import time
from collections.abc import Callable, Iterator


def never_backward(clock: Callable[[], float]) -> Callable[[], float]:
    """`clock` without its jumps backward: it goes on from where it was, so that no pause or deadline becomes longer."""
    newest, made_up = clock(), 0.0

    def read() -> float:
        nonlocal newest, made_up
        now = clock()
        made_up += max(0.0, newest - now)
        newest = now
        return now + made_up

    return read


NAP_S = 0.05


class Clock:
    """Seconds since the start: real time, less what is not to count, plus simulated waits skipped instead of slept.

    clock() reads it; while it is stopped it stands still. A run with simulated environments takes only its compute
    time, and is charged for the waits all the same, with everything that overlaps them. With `sleeps` they are slept
    after all, so that devices are seen to idle.
    """

    def __init__(self, real=time.monotonic, *, sleeps: bool = False):
        self._real, self._sleeps = real, sleeps
        self._zero = real()
        self._frozen: float | None = None

    def __call__(self) -> float:
        return self._real() - self._zero if self._frozen is None else self._frozen

    def skip_to(self, moment: float) -> None:
        """Passes the time until `moment`, which may lie in the past. This counts even while the clock is stopped.

        Where it is slept, part of it may be left: what else there is to do is not to wait for long.
        """
        if self._frozen is not None:
            self._frozen = max(self._frozen, moment)
        elif self._sleeps:
            time.sleep(min(max(0.0, moment - self()), NAP_S))
        else:
            self._zero -= max(0.0, moment - self())

    def restore(self, seconds: float) -> None:
        """Goes on from `seconds`, as a resumed run does."""
        self._frozen = None if self._frozen is None else seconds
        self._zero = self._real() - seconds

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens inside does not count, such as an evaluation: simulated waits go on only where they are skipped,
        since nothing else could go on."""
        self._frozen = self()
        try:
            yield
        finally:
            seconds, self._frozen = self._frozen, None
            self.restore(seconds)
