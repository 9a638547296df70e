"""How the claims about the runtime are measured: scheduling, hot spots."""

import queue
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sao_jax.report.intervals import mean_interval
from sao_jax.runtime.router import NoWorkerError, Router
from sao_jax.runtime.simulation import Cluster, simulate

WORKERS, TASKS = 64, 10_000
TASK_MS, SIGMA, LOAD = 10.0, 1.29, 0.6  # median task, spread of its logarithm, mean load of all workers


def start_latencies(policy: str, tasks: int, seed: int, check: Callable[[], None]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from ready to started on threads that stand for workers, and seconds of each decision. [tasks] each."""
    rng = np.random.default_rng(seed)
    seconds = TASK_MS / 1e3 * np.exp(SIGMA * rng.standard_normal(tasks))
    gaps = rng.exponential(TASK_MS / 1e3 * np.exp(SIGMA**2 / 2) / (LOAD * WORKERS), tasks)
    started, decision, ready = np.zeros(tasks), np.zeros(tasks), np.zeros(tasks)
    inboxes = [queue.SimpleQueue() for _ in range(WORKERS)]
    ended: queue.SimpleQueue = queue.SimpleQueue()

    def work(number: int) -> None:
        while (task := inboxes[number].get()) is not None:
            started[task] = time.perf_counter()
            time.sleep(seconds[task])
            ended.put((task, number))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(WORKERS)]
    for thread in threads:
        thread.start()
    router = Router(seed=seed)
    for i in range(WORKERS):
        router.join(str(i), slots=1)
    routed_at, waiting, left, turn = {}, [], tasks, 0

    def take_ended(wait: float) -> None:
        nonlocal left
        try:
            while True:
                task, number = ended.get(timeout=wait) if wait > 0 else ended.get_nowait()
                wait, left = 0.0, left - 1
                if policy == "adaptive":
                    now = time.perf_counter()
                    router.ended(str(number), now - routed_at.pop(task), now)
        except queue.Empty:
            pass

    def place(task: int) -> bool:
        nonlocal turn
        begin = time.perf_counter()
        if policy == "adaptive":
            try:
                number = int(router.route(task, begin))
            except NoWorkerError:
                return False
            routed_at[task] = begin
        else:
            number, turn = turn % WORKERS, turn + 1
        decision[task] = time.perf_counter() - begin
        inboxes[number].put(task)
        return True

    due = time.perf_counter() + np.cumsum(gaps)
    for task in range(tasks):
        while (left_s := due[task] - time.perf_counter()) > 0 or (waiting and place(waiting[0]) and waiting.pop(0)):
            take_ended(min(max(left_s, 0.0), 0.005))
        check()
        take_ended(0.0)
        ready[task] = time.perf_counter()
        if waiting or not place(task):
            waiting.append(task)
    while left:
        check()
        while waiting and place(waiting[0]):
            waiting.pop(0)
        take_ended(0.05)
    for inbox in inboxes:
        inbox.put(None)
    return started - ready, decision


def scheduling_latency(quick, results, check) -> dict[str, Any]:
    """Median of the 99 % quantiles over repetitions, static against adaptive."""
    tasks, repetitions = (1000, 2) if quick else (TASKS, 5)
    figures: dict[str, list[np.ndarray]] = {"adaptive": [], "round_robin": []}
    for seed in range(repetitions):
        for policy, found in figures.items():
            latency, decision = start_latencies(policy, tasks, seed, check)
            found.append(1e3 * np.array([*np.percentile(latency, [50, 99]), np.percentile(decision, 99)]))
    ours, theirs = (np.array(figures[p]) for p in ("adaptive", "round_robin"))
    notes = {
        f"{p} {name}": round(float(np.median(np.array(figures[p])[:, i])), 3)
        for p in figures for i, name in enumerate(("p50 [ms]", "p99 [ms]", "decision p99 [ms]"))
    }  # fmt: skip
    return dict(
        effect=mean_interval((theirs[:, 1] / ours[:, 1]).tolist()),
        value=float(np.median(ours[:, 1])),
        baseline=float(np.median(theirs[:, 1])),
        seeds=list(range(repetitions)),
        sizes={"tasks": tasks, "workers": WORKERS, "load": LOAD, "task_ms": TASK_MS, "sigma": SIGMA},
        notes=notes,
        null=1.0,
    )


def hot_spots(quick, results, check) -> dict[str, Any]:
    """Share of device time above the limit in a simulated cluster, with and without temperatures in the weights."""
    cluster, tasks = Cluster(workers=64, load=0.7, warmest_c=50.0), 2000 if quick else 20_000
    seeds = list(range(2 if quick else 5))
    hot: dict[bool, list[float]] = {True: [], False: []}
    for seed in seeds:
        for balance, found in hot.items():
            check()
            found.append(100 * simulate(cluster, tasks, balance=balance, seed=seed).hot)
    less = [100 * (1 - a / b) if b else 0.0 for a, b in zip(hot[True], hot[False], strict=True)]
    return dict(
        effect=mean_interval(less),
        value=statistics.fmean(hot[True]),
        baseline=statistics.fmean(hot[False]),
        seeds=seeds,
        sizes={"workers": cluster.workers, "tasks": tasks, "load": cluster.load},
    )
