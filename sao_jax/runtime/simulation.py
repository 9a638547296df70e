"""Discrete-event simulations that drive the router and the controller of concurrency with many workers and heavy tails.

`simulate`: tasks arrive at random, each takes a lognormal time on a worker of its own speed, and devices warm up by it.
`simulate_concurrency`: attempts alternate between a device and slow environments, and the controller sets how
many there are. Router and controller are those of a run; time, tasks and temperatures are made up.
"""

import dataclasses
import math
import time
from typing import Literal

import numpy as np

from sao_jax.runtime.concurrency import Control, Level, decide
from sao_jax.runtime.concurrency import Reading as Load
from sao_jax.runtime.router import Limits, NoWorkerError, Reading, Router


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`slots` tasks run at once on each worker. Speeds are lognormal with `speed_sigma` around 1, task times lognormal
    with `median_s` and `sigma`; tasks arrive so that the mean load is `load` of all slots.

    A device's temperature tends to its surroundings' (uniform between `coolest_c` and `warmest_c`) plus `rise_c` at
    full load, with time constant `inertia_s`. Of its memory, others leave a share between `least_room` and all
    (uniform), of which every task takes `task_memory` while it runs. Both are read every `reading_s` seconds.
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
    least_room: float = 1.0
    task_memory: float = 0.0
    reading_s: float = 1.0


@dataclasses.dataclass(frozen=True)
class Figures:
    """latency_s: from ready to started, per task; decision_s: time that the router took, per task, as measured; hot,
    full: share of device time above the limit of temperature, below that of free memory; spots: either; seconds:
    simulated."""

    latency_s: np.ndarray
    decision_s: np.ndarray
    hot: float
    full: float
    spots: float
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
    """Runs `tasks` tasks. `balance=False` keeps readings of devices from the router."""
    simpy = _simpy()
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
    room = rng.uniform(c.least_room, 1.0, c.workers)
    temperature = surroundings.copy()
    places = [simpy.Resource(env, c.slots) for _ in names]
    mean_s = c.median_s * math.exp(c.sigma**2 / 2)
    rate = c.load * c.workers * c.slots * float(np.mean(speed)) / mean_s
    work = c.median_s * np.exp(c.sigma * rng.standard_normal(tasks))
    gaps = rng.exponential(1.0 / rate, tasks)
    latency, decision = np.zeros(tasks), np.zeros(tasks)
    waiting: list[tuple[int, float]] = []  # tasks that found no worker, oldest first
    left = tasks
    spots: list[tuple[int, int, int]] = []  # devices at each reading that are hot, full, either
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
        step = 1.0 - math.exp(-c.reading_s / c.inertia_s)
        while True:
            yield env.timeout(c.reading_s)
            running = np.array([p.count for p in places])
            temperature[:] += step * (surroundings + c.rise_c * running / c.slots - temperature)
            free = np.maximum(room - c.task_memory * running, 0.0)
            hot, full = temperature > limits.hot_c, free < limits.full
            spots.append((hot.sum(), full.sum(), (hot | full).sum()))
            if balance:
                for name, *reading in zip(names, temperature.tolist(), free.tolist(), strict=True):
                    router.observe(name, Reading(*reading))

    env.process(arrivals())
    env.process(thermometers())
    env.run(over)
    shares = np.mean(spots, axis=0) / c.workers if spots else np.zeros(3)
    return Figures(latency, decision, *shares.tolist(), env.now)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the controller saw, and the level it set, at a simulated time."""

    time_s: float
    utilization: float
    level: Level


def simulate_concurrency(
    cluster: Cluster,
    control: Control,
    *,
    seconds: float,
    decode_s: float = 0.05,
    turns: int = 4,
    decide_s: float = 2.0,
    slower_at: float = math.inf,
    slower_by: float = 1.0,
    seed: int = 0,
) -> list[Decision]:
    """Attempts of `turns` actions, each `decode_s` on the device of its worker, then as long as the environment takes.

    Environments take `cluster.median_s` (times `slower_by` from `slower_at` on) with `cluster.sigma`. As many attempts
    run as the level says, all on the worker that the router gives them. A device is busy while any attempt decodes on
    it, as that of a sampler that decodes many rows at once.
    """
    simpy = _simpy()
    c, rng = cluster, np.random.default_rng(seed)
    env = simpy.Environment()
    router, names = Router(seed=seed), [f"w{i}" for i in range(c.workers)]
    for name in names:
        router.join(name, slots=c.slots)
    number = {name: i for i, name in enumerate(names)}
    decoding, since, busy_s = [0] * c.workers, [0.0] * c.workers, [0.0] * c.workers
    level, running, found = Level(control.lowest), 0, []

    def change(i: int, by: int) -> None:
        busy_s[i] += (env.now - since[i]) * (decoding[i] > 0)
        since[i], decoding[i] = env.now, decoding[i] + by

    def attempt(name: str):
        nonlocal running
        begun, i = env.now, number[name]
        for _ in range(turns):
            change(i, 1)
            yield env.timeout(decode_s)
            change(i, -1)
            median = c.median_s * (slower_by if env.now >= slower_at else 1.0)
            yield env.timeout(median * math.exp(c.sigma * rng.standard_normal()))
        router.ended(name, env.now - begun, env.now)
        running -= 1
        fill()

    def fill() -> None:
        nonlocal running
        while running < int(level):
            try:
                name = router.route(running, env.now)
            except NoWorkerError:
                return
            running += 1
            env.process(attempt(name))

    def controller():
        nonlocal level
        while True:
            fill()
            yield env.timeout(decide_s)
            for i in range(c.workers):
                change(i, 0)
            utilization = sum(busy_s) / (c.workers * decide_s)
            busy_s[:] = [0.0] * c.workers
            level = decide(control, level, Load(utilization, 0.0, control.highest))
            found.append(Decision(env.now, utilization, level))

    env.process(controller())
    env.run(seconds)
    return found


def _simpy():
    try:
        import simpy
    except ImportError:
        raise ValueError("the simulation needs simpy: pip install 'sao_jax[simulation]'") from None
    return simpy
