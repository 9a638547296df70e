"""How the claims about the runtime are measured: scheduling, hot spots, recovery from faults."""

import contextlib
import math
import os
import pathlib
import queue
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np

from experiments._ablations import ENDLESS, SMALL
from experiments._claim import Measured, Request
from experiments.ablate import COMMAND, ROOT, arguments
from sao_jax.envs.calculator import Calculator
from sao_jax.report.intervals import mean_interval, ratio_interval
from sao_jax.rollout.agents import Failure
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.ledger import Ledger, LedgerError
from sao_jax.runtime.links import LocalBackend
from sao_jax.runtime.router import NoWorkerError, Router
from sao_jax.runtime.simulation import Cluster, simulate
from sao_jax.runtime.workers import Workers

WORKERS, TASKS = 64, 10_000
TASK_MS, SIGMA, LOAD = 10.0, 1.29, 0.6  # median task, spread of its logarithm, mean load of all workers


def start_latencies(policy: str, tasks: int, seed: int, check: Callable[[], None]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds from ready to started on threads that stand for workers, and seconds of each decision. [tasks] each."""
    rng = np.random.default_rng(seed)
    seconds = TASK_MS / 1e3 * np.exp(SIGMA * rng.standard_normal(tasks))
    gaps = rng.exponential(TASK_MS / 1e3 * np.exp(SIGMA**2 / 2) / (LOAD * WORKERS), tasks)
    started, decision = np.zeros(tasks), np.zeros(tasks)
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

    def place_waiting() -> None:
        while waiting and place(waiting[0]):
            waiting.pop(0)

    ready = time.perf_counter() + np.cumsum(gaps)
    for task in range(tasks):
        check()
        while (left_s := ready[task] - time.perf_counter()) > 0:
            take_ended(min(left_s, 0.005))
            place_waiting()
        take_ended(0.0)
        place_waiting()
        if waiting or not place(task):
            waiting.append(task)
    while left:
        check()
        place_waiting()
        take_ended(0.05)
    for inbox in inboxes:
        inbox.put(None)
    return started - ready, decision


def scheduling_latency(asked: Request) -> Measured:
    """Median of the 99 % quantiles over repetitions, static against adaptive."""
    tasks, repetitions = (1000, asked.seeds or 2) if asked.quick else (TASKS, asked.seeds or 5)
    figures: dict[str, list[np.ndarray]] = {"adaptive": [], "round_robin": []}
    for seed in range(repetitions):
        for policy, found in figures.items():
            latency, decision = start_latencies(policy, tasks, seed, asked.check)
            found.append(1e3 * np.array([*np.percentile(latency, [50, 99]), np.percentile(decision, 99)]))
    ours, theirs = (np.array(figures[p]) for p in ("adaptive", "round_robin"))
    notes = {
        f"{p} {name}": round(float(np.median(np.array(figures[p])[:, i])), 3)
        for p in figures for i, name in enumerate(("p50 [ms]", "p99 [ms]", "decision p99 [ms]"))
    }  # fmt: skip
    return Measured(
        effect=ratio_interval((theirs[:, 1] / ours[:, 1]).tolist()),
        value=float(np.median(ours[:, 1])),
        baseline=float(np.median(theirs[:, 1])),
        seeds=list(range(repetitions)),
        sizes={"tasks": tasks, "workers": WORKERS, "load": LOAD, "task_ms": TASK_MS, "sigma": SIGMA},
        notes=notes,
        null=1.0,
    )


def hot_spots(asked: Request) -> Measured:
    """Share of device time above the limit of temperature or below that of free memory in a simulated cluster, with and
    without both in the weights; each limit by itself is in the notes."""
    cluster = Cluster(
        workers=64, slots=4, load=0.6, warmest_c=50.0, rise_c=60.0, least_room=0.3, task_memory=0.15
    )  # fmt: skip
    tasks = 4000 if asked.quick else 40_000
    seeds = list(range(asked.seeds or (2 if asked.quick else 5)))
    hot: dict[bool, list[float]] = {True: [], False: []}
    parts: dict[str, list[float]] = {}
    for seed in seeds:
        for balance, found in hot.items():
            asked.check()
            figures = simulate(cluster, tasks, balance=balance, seed=seed)
            found.append(100 * figures.spots)
            for what in ("hot", "full"):
                name = f"{what}, {'with' if balance else 'without'} balance, % of the time"
                parts.setdefault(name, []).append(100 * getattr(figures, what))
    large = {}
    if not asked.quick:
        began = time.process_time()
        simulate(Cluster(workers=10_000, reading_s=5.0), 100_000)
        large["10,000 workers, 100,000 tasks, seconds of one core"] = round(time.process_time() - began, 1)
    less = [100 * (1 - a / b) if b else 0.0 for a, b in zip(hot[True], hot[False], strict=True)]
    return Measured(
        effect=mean_interval(less),
        value=statistics.fmean(hot[True]),
        baseline=statistics.fmean(hot[False]),
        seeds=seeds,
        sizes={"workers": cluster.workers, "slots": cluster.slots, "tasks": tasks, "load": cluster.load},
        notes={name: round(statistics.fmean(shares), 2) for name, shares in parts.items()} | large,
    )


# -- recovery ----------------------------------------------------------------------------------------------------------

HUNG_S = 3.0  # without a sign of life


class Busy:
    """Rollout processes that are kept full; attempts that fail are started again at once.

    `restarted`: times at which attempts that had failed were started again; `noted`: at which processes were replaced.
    """

    def __init__(self, folder: pathlib.Path, check: Callable[[], None]):
        import jax

        from sao_jax.runtime.run import family_and_context, random_policy

        config = RunConfig(**SMALL, task="calculator", workers=2, slots=16, worker_timeout=HUNG_S)
        family, context = family_and_context(config)
        self.noted: list[tuple[float, str]] = []
        self.restarted: list[float] = []
        self.workers = Workers(
            config, family, context, folder, LocalBackend(folder / "workers"),
            note=lambda line: self.noted.append((time.monotonic(), line)),
        )  # fmt: skip
        self.params = jax.tree.map(np.asarray, random_policy(config, family))
        self.workers.publish(self.params, 0)
        self._check, self._next, self._again = check, 0, []

    def turn(self) -> None:
        self._check()
        for item in self.workers.collect(wait=0.01):
            if isinstance(item, Failure):
                self._again.append((item.rollout, item.attempt + 1))
        while self.workers.free > 0:
            if self._again:
                rollout, attempt = self._again.pop()
                self.restarted.append(time.monotonic())
            else:
                rollout, attempt, self._next = self._next, 0, self._next + 1
            self.workers.start("train", rollout, rollout=rollout, attempt=attempt)

    def until(self, holds: Callable[[], bool], seconds: float = 120.0) -> float:
        """Goes on until `holds()`; returns the time then."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise ValueError(f"no recovery within {seconds:g} s: {self.noted[-1:]}")
            self.turn()
        return time.monotonic()

    def whole(self) -> bool:
        """Every process samples with the newest weights and has work."""
        entries = self.workers.describe()
        newest = self.workers.version
        return len(entries) == 2 and all(e["version"] == newest and e["running"] for e in entries)


def worker_faults(folder: pathlib.Path, repetitions: int, check) -> dict[str, list[dict[str, float]]]:
    """Seconds from a fault of a rollout process until it is noticed, until its attempts run again elsewhere, and until
    another process has taken its place."""
    folder.mkdir(parents=True, exist_ok=True)
    busy, found = Busy(folder, check), {}
    try:
        for fault, name in ((signal.SIGKILL, "process killed"), (signal.SIGSTOP, "process hung")):
            for _ in range(repetitions):
                busy.until(busy.whole)
                victim = busy.workers.describe()[0]
                lost, restarted, noted = victim["running"], len(busy.restarted), len(busy.noted)
                begin = time.monotonic()
                os.kill(int(victim["where"].split()[-1]), fault)
                noticed = busy.until(lambda noted=noted: len(busy.noted) > noted)
                again = busy.until(lambda count=restarted + lost: len(busy.restarted) >= count)
                replaced = busy.until(busy.whole)
                times = {"noticed": noticed, "attempts run again": again, "process replaced": replaced}
                found.setdefault(name, []).append({k: v - begin for k, v in times.items()})
    finally:
        busy.workers.close()
    return found


class Hanging(Calculator):
    """The calculator, whose environments hang, each in its next step, as often as `hangs` says; `at`: when they did."""

    fast = False
    hangs, at = 0, 0.0

    def respond(self, problem, actions):
        if self.hangs:
            self.hangs, self.at = self.hangs - 1, time.monotonic()
            threading.Event().wait()
        return super().respond(problem, actions)


def environment_faults(repetitions: int, check) -> list[dict[str, float]]:
    """Seconds from when an environment hangs until that is noticed, and until its rollout has been sampled anew."""
    from sao_jax.runtime.devices import data_mesh
    from sao_jax.runtime.run import make_agents, make_engine, random_policy

    config = RunConfig(**SMALL, slots=16, env_timeout=HUNG_S)
    family = Hanging()
    engine = make_engine(config, family, family.max_tokens, random_policy(config, family), data_mesh(1))
    agents, found = make_agents(config, family, family.max_tokens, engine), []
    engine.warm_up(check)
    for repetition in range(repetitions):
        family.hangs, waiting, times = 1, list(range(16)), {}
        while "sampled anew" not in times:
            check()
            for item in agents.collect():
                rollout = item.rollout
                if isinstance(item, Failure) and "no answer" in item.reason:
                    times["noticed"], again = time.monotonic() - family.at, rollout
                    waiting.insert(0, rollout)
                elif "noticed" in times and rollout == again:
                    times["sampled anew"] = time.monotonic() - family.at
                else:
                    waiting.append(rollout)
            while agents.free > 0 and waiting:
                agents.start("train", repetition, rollout=waiting.pop(0))
            agents.dispatch()
        agents.stop()
        found.append(times)
    return found


def run_faults(
    folder: pathlib.Path, repetitions: int, check, kill: Callable[[int], None] | None = None, hosts: int = 1
) -> list[dict[str, float]]:
    """Seconds from a fault of a run until it has made an update more than before.

    The fault is a kill of the whole run, which is started again at once; or `kill(pid of the launcher)`, after which
    the launcher of a run over several hosts has to start it again.
    """
    words = arguments(ENDLESS | dict(checkpoint_every=8)) + (["--num-hosts", str(hosts)] if hosts > 1 else [])
    log = folder.with_suffix(".txt").open("w")

    def start(*words: str) -> subprocess.Popen:
        return subprocess.Popen([*COMMAND, *words], cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def updates() -> int:
        if not (folder / "ledger.sqlite").exists():
            return 0
        with contextlib.suppress(LedgerError), Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
            return sum(1 for _ in ledger.events(kinds=("update",)))
        return 0

    def until(process: subprocess.Popen, count: int) -> None:
        while updates() < count:
            check()
            if process.poll() is not None:
                raise ValueError(f"the run ended, see {log.name}")
            time.sleep(0.05)

    found, process = [], start(*words, "--run-dir", str(folder))
    try:
        until(process, 10)
        for _ in range(repetitions):
            if kill is None:
                process.kill()
                process.wait()
            else:
                kill(process.pid)
            before, begin = updates(), time.monotonic()
            if kill is None:
                process = start("--resume", str(folder))
            until(process, before + 1)
            found.append({"next update": time.monotonic() - begin})
            until(process, before + 4)
    finally:
        process.kill()
        process.wait()
        log.close()
    return found


def kill_follower(launcher: int) -> None:
    """SIGKILLs the process of the second host."""
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        if "--host-index\x001" in pathlib.Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)
            return
    raise ValueError("the process of the second host is not there")


def recovery(asked: Request) -> Measured:
    """A minute over the slowest recovery, its 95 % quantile over repetitions; every fault is in the notes."""
    repetitions = asked.seeds or (2 if asked.quick else 10)
    with tempfile.TemporaryDirectory() as folder:
        found = worker_faults(pathlib.Path(folder) / "workers", repetitions, asked.check)
        found["environment hung"] = environment_faults(repetitions, asked.check)
        found["run killed"] = run_faults(pathlib.Path(folder) / "run", repetitions, asked.check)
        found["host killed"] = run_faults(
            pathlib.Path(folder) / "hosts", repetitions, asked.check, kill=kill_follower, hosts=2
        )
    notes = {}
    for fault, cases in found.items():
        for stage in cases[0]:
            p50, p95 = np.percentile([case[stage] for case in cases], [50, 95])
            notes[f"{fault}: {stage}, p50 / p95 [s]"] = [round(float(p50), 2), round(float(p95), 2)]
    worst = max(found, key=lambda fault: max(max(case.values()) for case in found[fault]))
    seconds = [max(case.values()) for case in found[worst]]
    return Measured(
        ratio_interval([60.0 / s for s in seconds]),
        float(np.percentile(seconds, 95)),
        math.nan,
        list(range(repetitions)),
        {"workers": 2, "hung_s": HUNG_S, "worst": worst},
        notes,
        null=1.0,
    )
