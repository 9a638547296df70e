"""Which worker gets the next task.

A decision compares a few of the workers that can take a task, drawn at random, and takes the one with the largest
weight, so its cost does not grow with their number. Weights follow load, measured latency, temperature and free memory;
a worker that fails gets nothing for a while, and one that has been left out for long is tried now and then.

A trajectory is routed once and stays with its worker, where its cache is. When a worker leaves, its trajectories alone
are routed again, by consistent hashing: a burst of them is not to follow estimates that it would itself upset.

Nothing here reads a clock or a device: times and readings come with the calls, so that simulations drive the same code.
"""

import dataclasses
import hashlib
import heapq
import math
import random
from collections.abc import Hashable, Iterable


@dataclasses.dataclass(frozen=True)
class Reading:
    """A device's temperature in degrees Celsius and the free share of its memory; NaN: not known."""

    temperature_c: float = math.nan
    free_memory: float = math.nan


SCARCE = 0.05  # of a weight is left where there is no free memory


@dataclasses.dataclass(frozen=True)
class Limits:
    """Between `warm_c` and `hot_c` a worker's weight falls linearly to 0, between `scarce` and `full` free memory to
    `SCARCE`.

    A device slows itself down at its own limit; weights have to move before it. One that is too hot cools while it gets
    nothing; memory that an engine holds does not come back, so that others are preferred and no more.
    """

    warm_c: float = 70.0
    hot_c: float = 85.0
    scarce: float = 0.20
    full: float = 0.05

    def __post_init__(self):
        if not self.warm_c < self.hot_c:
            raise ValueError(f"warm_c is {self.warm_c}, hot_c {self.hot_c}; warm must be below hot")
        if not 0.0 <= self.full < self.scarce <= 1.0:
            raise ValueError(f"full is {self.full}, scarce {self.scarce}; needed: 0 <= full < scarce <= 1")

    def factor(self, reading: Reading) -> float:
        """In [0, 1]: the product of what temperature and memory leave; what is not known leaves 1."""
        cool = (self.hot_c - reading.temperature_c) / (self.hot_c - self.warm_c)
        free = (reading.free_memory - self.full) / (self.scarce - self.full)
        limits = (cool, 0.0), (free, SCARCE)
        return math.prod(min(max(x, least), 1.0) for x, least in limits if not math.isnan(x))


@dataclasses.dataclass(eq=False)
class Worker:
    """What the router knows of one. `latency_s`: smoothed time of a task; None before the first one has ended."""

    name: str
    slots: int
    running: int = 0
    latency_s: float | None = None
    failures: int = 0  # since the last task that ended well
    barred_until: float = -math.inf
    factor: float = 1.0  # what temperature and memory leave of its weight
    routed_at: float = -math.inf
    place: int | None = None  # in the list of workers that can take a task

    def expected_s(self, unknown_s: float) -> float:
        """Time until a further task would be done, as far as it depends on this worker; the inverse of its weight."""
        latency = unknown_s if self.latency_s is None else self.latency_s
        return (self.running + 1) / self.slots * latency / self.factor


SMOOTHING = 0.2  # weight of the newest latency
CANDIDATES = 4  # workers that a decision compares
EXPLORATION = 0.02  # share of decisions for the candidate that has waited longest, whatever is known of it
BAR_S = 1.0  # a worker that fails is left alone this long, twice as long each time
MAX_BAR_S = 60.0


class NoWorkerError(RuntimeError):
    """No worker can take a task now."""


class Router:
    """Chooses workers for tasks.

        router.join("a", slots=8)
        name = router.route("task 7", now)      # NoWorkerError if all are full, barred or too hot
        router.ended(name, seconds, now)        # or router.failed(name, now)

    Attributes:
      workers: by name.
    """

    def __init__(self, *, limits: Limits | None = None, seed: int = 0):
        self.workers: dict[str, Worker] = {}
        self._limits, self._rng = limits or Limits(), random.Random(seed)
        self._open: list[Worker] = []  # those that can take a task
        self._barred: list[tuple[float, str]] = []  # a heap of when they may be tried again
        self._quickest = 1e-6  # a worker not heard of yet counts as the quickest

    # ---- the set of workers

    def join(self, name: str, *, slots: int) -> None:
        if name in self.workers:
            raise ValueError(f"worker {name!r} has joined already")
        if slots < 1:
            raise ValueError(f"worker {name!r} has {slots} slots; it needs at least 1")
        self.workers[name] = worker = Worker(name, slots)
        self._file(worker)

    def leave(self, name: str) -> None:
        """The worker is gone, and what ran on it is to be routed again."""
        self._unfile(self.workers.pop(name))

    def observe(self, name: str, reading: Reading) -> None:
        """A new reading of a worker's device."""
        worker = self.workers[name]
        worker.factor = self._limits.factor(reading)
        self._file(worker)

    # ---- tasks

    def route(self, key: Hashable, now: float, *, moved: bool = False) -> str:
        """The worker for a trajectory. `moved`: the one that had it has left; every router then sends it to the same
        one of those that can take a task, whatever it knows of their load."""
        self._reopen(now)
        if not self._open:
            raise NoWorkerError(f"none of {len(self.workers)} workers has a free slot and is healthy and cool")
        worker = self.workers[owner(key, (w.name for w in self._open))] if moved else self._choose()
        worker.running += 1
        worker.routed_at = now
        self._file(worker)
        return worker.name

    def ended(self, name: str, seconds: float, now: float) -> None:
        """A task of the worker ended well, `seconds` after it was routed."""
        worker = self.workers.get(name)
        if worker is None:
            return  # it has left meanwhile
        old = worker.latency_s
        worker.latency_s = seconds if old is None else old + SMOOTHING * (seconds - old)
        self._quickest += 0.01 * (seconds - self._quickest) if seconds > self._quickest else seconds - self._quickest
        worker.running -= 1
        worker.failures = 0
        self._file(worker)

    def release(self, name: str) -> None:
        """A task of the worker was given up; that says nothing about the worker."""
        if (worker := self.workers.get(name)) is not None:
            worker.running -= 1
            self._file(worker)

    def free(self, now: float) -> int:
        """Tasks that could be routed now."""
        self._reopen(now)
        return sum(worker.slots - worker.running for worker in self._open)

    def failed(self, name: str, now: float) -> None:
        """A task of the worker failed or timed out: it gets none for a while."""
        worker = self.workers.get(name)
        if worker is None:
            return
        worker.running -= 1
        worker.failures += 1
        worker.barred_until = now + min(BAR_S * 2 ** (worker.failures - 1), MAX_BAR_S)
        heapq.heappush(self._barred, (worker.barred_until, name))
        self._unfile(worker)

    # ---- inner parts

    def _reopen(self, now: float) -> None:
        """Workers that have been left alone for long enough may be tried again."""
        while self._barred and self._barred[0][0] <= now:
            _, name = heapq.heappop(self._barred)
            if name in self.workers and self.workers[name].barred_until <= now:
                self.workers[name].barred_until = -math.inf
                self._file(self.workers[name])

    def _choose(self) -> Worker:
        few = len(self._open) <= CANDIDATES
        candidates = self._open if few else self._rng.sample(self._open, CANDIDATES)
        if self._rng.random() < EXPLORATION:
            return min(candidates, key=lambda w: w.routed_at)
        return min(candidates, key=lambda w: w.expected_s(self._quickest))

    def _file(self, worker: Worker) -> None:
        """Puts a worker into the list of those that can take a task, or takes it out."""
        if worker.running >= worker.slots or worker.factor <= 0.0 or worker.barred_until > -math.inf:
            self._unfile(worker)
        elif worker.place is None:
            worker.place = len(self._open)
            self._open.append(worker)

    def _unfile(self, worker: Worker) -> None:
        if worker.place is not None:
            last = self._open.pop()
            if last is not worker:
                self._open[worker.place], last.place = last, worker.place
            worker.place = None


def owner(key: Hashable, names: Iterable[str]) -> str:
    """Rendezvous hashing: every key has an order of all names, and goes to the first that is there.

    So when a name leaves only its keys move, and when one joins it takes an equal share from each of the others.
    """
    return max(names, key=lambda name: hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest())
