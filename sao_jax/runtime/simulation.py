"""A discrete-event simulation that drives the router with many workers and heavy tails.

Tasks arrive at random, each takes a lognormal time on a worker of its own speed, and devices warm up with what they do.
The router is the one that runs use; only time, tasks and temperatures are made up.
"""

import dataclasses
import math
import time
from typing import Literal

import numpy as np

from sao_jax.runtime.router import Limits, NoWorkerError, Reading, Router


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`slots` tasks run at once on each worker. Speeds are lognormal with `speed_sigma` around 1, task times lognormal
    with `median_s` and `sigma`; tasks arrive so that the mean load is `load` of all slots.

    A device's temperature tends to its surroundings' (uniform between `coolest_c` and `warmest_c`) plus `rise_c` at
    full load, with time constant `inertia_s`, and is read every `reading_s` seconds.
    """

    workers: int = 64
    slots: int = 1
    load: float = 0.8
    median_s: float = 1.0
    sigma: float = 1.29
    speed_sigma: float = 0.3
    coolest_c: float = 25.0
    warmest_c: float = 45.0
    rise_c: float = 45.0
    inertia_s: float = 30.0
    reading_s: float = 1.0


@dataclasses.dataclass(frozen=True)
class Figures:
    """latency_s: from ready to started, per task; decision_s: time that the router took, per task, as measured; hot:
    share of device time above the limit; seconds: simulated."""

    latency_s: np.ndarray
    decision_s: np.ndarray
    hot: float
    seconds: float

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.latency_s, q))


class _RoundRobin:
    """The static twin: workers in turn, whatever they have to do."""

    def __init__(self, names: list[str]):
        self._names, self._next = names, 0

    def route(self, key, now: float) -> str:
        self._next += 1
        return self._names[(self._next - 1) % len(self._names)]

    def ended(self, name: str, seconds: float, now: float) -> None:
        pass

    def observe(self, name: str, reading: Reading) -> None:
        pass


def simulate(
    cluster: Cluster,
    tasks: int,
    *,
    policy: Literal["adaptive", "round_robin"] = "adaptive",
    balance: bool = True,
    seed: int = 0,
    limits: Limits | None = None,
) -> Figures:
    """Runs `tasks` tasks. `balance=False` keeps temperatures from the router."""
    try:
        import simpy
    except ImportError:
        raise ValueError("the simulation needs simpy: pip install 'sao_jax[simulation]'") from None

    limits = limits or Limits()
    c, rng = cluster, np.random.default_rng(seed)
    env = simpy.Environment()
    names = [f"w{i}" for i in range(c.workers)]
    number = {name: i for i, name in enumerate(names)}
    if policy == "adaptive":
        router = Router(seed=seed, limits=limits)
        for name in names:
            router.join(name, slots=c.slots)
    else:
        router = _RoundRobin(names)
    speed = np.exp(c.speed_sigma * rng.standard_normal(c.workers))
    surroundings = rng.uniform(c.coolest_c, c.warmest_c, c.workers)
    temperature = surroundings.copy()
    places = [simpy.Resource(env, c.slots) for _ in names]
    mean_s = c.median_s * math.exp(c.sigma**2 / 2)
    rate = c.load * c.workers * c.slots * float(np.mean(speed)) / mean_s
    work = c.median_s * np.exp(c.sigma * rng.standard_normal(tasks))
    gaps = rng.exponential(1.0 / rate, tasks)
    latency, decision = np.zeros(tasks), np.zeros(tasks)
    waiting: list[tuple[int, float]] = []  # tasks that found no worker, oldest first
    left, hot, samples = tasks, 0, 0
    over = env.event()

    def place(task: int, ready: float) -> bool:
        start = time.perf_counter()
        try:
            name = router.route(task, env.now)
        except NoWorkerError:
            return False
        decision[task] = time.perf_counter() - start
        env.process(run(task, ready, name))
        return True

    def run(task: int, ready: float, name: str):
        nonlocal left
        i, routed = number[name], env.now
        with places[i].request() as request:
            yield request
            latency[task] = env.now - ready
            yield env.timeout(work[task] / speed[i])
        router.ended(name, env.now - routed, env.now)
        left -= 1
        while waiting and place(*waiting[0]):
            waiting.pop(0)
        if not left:
            over.succeed()

    def arrivals():
        for task in range(tasks):
            yield env.timeout(gaps[task])
            if waiting or not place(task, env.now):
                waiting.append((task, env.now))

    def thermometers():
        nonlocal hot, samples
        step = 1.0 - math.exp(-c.reading_s / c.inertia_s)
        while True:
            yield env.timeout(c.reading_s)
            busy = np.array([p.count for p in places]) / c.slots
            temperature[:] += step * (surroundings + c.rise_c * busy - temperature)
            hot, samples = hot + int(np.sum(temperature > limits.hot_c)), samples + c.workers
            if balance:
                for name, t in zip(names, temperature.tolist(), strict=True):
                    router.observe(name, Reading(temperature_c=t))

    env.process(arrivals())
    env.process(thermometers())
    env.run(over)
    return Figures(latency, decision, hot / max(samples, 1), env.now)
