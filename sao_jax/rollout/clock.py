"""The time that a run is charged for."""

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Seconds since the start: real time, less what is not to count, plus simulated waits skipped instead of slept.

    clock() reads it. A run with simulated environments so takes only its compute time, and is charged for the waits all
    the same, with everything that overlaps them.
    """

    def __init__(self, real=time.monotonic):
        self._real = real
        self._zero = real()

    def __call__(self) -> float:
        return self._real() - self._zero

    def skip_to(self, moment: float) -> None:
        """Passes the time until `moment`, which may lie in the past."""
        self._zero -= max(0.0, moment - self())

    def restore(self, seconds: float) -> None:
        """Goes on from `seconds`, as a resumed run does."""
        self._zero = self._real() - seconds

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """What happens inside does not count: evaluations, checkpoints of an experiment."""
        start = self._real()
        try:
            yield
        finally:
            self._zero += self._real() - start
