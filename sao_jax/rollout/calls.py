"""Environment calls that may take long, or for ever."""

import queue
import threading
from collections.abc import Callable

from sao_jax.rollout.episode import Episode


class Calls:
    """Environment calls on daemon threads, each with a deadline."""

    def __init__(self, workers: int, timeout: float, clock: Callable[[], float]):
        self._timeout, self._clock = timeout, clock
        self._todo: queue.SimpleQueue = queue.SimpleQueue()
        self._done: queue.SimpleQueue = queue.SimpleQueue()
        self._started: dict[int, tuple[float, Episode, str]] = {}
        self._lock = threading.Lock()
        self._tickets = 0
        for _ in range(workers):
            self._hire()

    def _hire(self) -> None:
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def submit(self, episode: Episode, method: Callable) -> None:
        self._tickets += 1
        self._todo.put((self._tickets, episode, method))

    def _work(self) -> None:
        while True:
            ticket, episode, method = self._todo.get()
            with self._lock:
                self._started[ticket] = (self._clock(), episode, method.__name__)
            answer = method()  # an episode turns whatever its environment raises into an aborted attempt
            with self._lock:
                late = self._started.pop(ticket, None) is None
            if late:
                return  # given up and replaced
            self._done.put((episode, method.__name__, answer, None))

    def answers(self, wait: float) -> list[tuple]:
        """Calls that returned or ran out of time; waits up to `wait` seconds for the first."""
        out = []
        try:
            out.append(self._done.get(timeout=wait) if wait else self._done.get_nowait())
            while True:
                out.append(self._done.get_nowait())
        except queue.Empty:
            pass
        now = self._clock()
        with self._lock:
            hung = [(t, e, m) for t, (start, e, m) in self._started.items() if now - start > self._timeout]
            for ticket, _, _ in hung:
                del self._started[ticket]
        for _, episode, method in hung:
            self._hire()
            out.append((episode, method, None, f"environment gave no answer within {self._timeout:g} s"))
        return out
