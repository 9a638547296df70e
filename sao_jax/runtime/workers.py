"""Attempts on rollout processes: what `Agents` is to one engine, for several of them.

Each process has an engine and environments of its own (`runtime.worker`). A process that dies, stops answering or sends
garbage is replaced; its attempts fail, and the loop starts them again from their last stored segment. Weights are
published in two phases: every process loads and checks them, and only when all have does any sample with them.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np

from sao_jax.data.protocols import Split, TaskFamily
from sao_jax.data.segments import Segment, load_segment
from sao_jax.data.trajectory import Trajectory, check_content, load_trajectory, save_trajectory
from sao_jax.rollout.agents import Failure
from sao_jax.rollout.clock import never_backward
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.links import Backend, Link
from sao_jax.runtime.router import Reading, Router
from sao_jax.runtime.trace import Trace
from sao_jax.runtime.weights import save_weights

RETRY_S = 1.0  # before a publication or the start of a process is tried again
FAILED_STARTS = 3  # by each process in a row, with none that became ready: then they never will
START_TIMEOUT_S = 600.0  # a process that compiles says nothing meanwhile


class FailedWorkersError(ValueError):
    """No rollout process comes up."""


@dataclasses.dataclass(eq=False)
class _Process:
    """One rollout process. `version`: of the weights it samples with; None until it has any; `told`: of those it is to
    sample with. `status`: its newest."""

    name: str
    link: Link
    heard_at: float
    ready: bool = False
    version: int | None = None
    told: int | None = None
    status: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Attempt:
    process: _Process
    attempt: int
    oldest_version: int
    started_at: float


@dataclasses.dataclass
class _Publication:
    """Weights on their way, or in use. `crc32`: of the file, None until it has been written; `waiting`, `loaded`:
    processes that have still to load them, and that have."""

    version: int
    params: dict
    path: pathlib.Path
    crc32: int | None = None
    waiting: set[_Process] = dataclasses.field(default_factory=set)
    loaded: set[_Process] = dataclasses.field(default_factory=set)
    not_before: float = 0.0


class Workers:
    """Runs attempts on `config.workers` processes, `config.slots` in all.

    Attributes:
      version: of the weights that processes sample with.
      seam: called with each segment of an attempt under way when it is complete.
    """

    last_schedule = None  # bursts of several engines have no common order to be driven again in

    def __init__(
        self,
        config: RunConfig,
        family: TaskFamily,
        context: int,
        folder: pathlib.Path,
        backend: Backend,
        *,
        readings: str | None = None,
        note: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.family, self.version = family, 0
        self.seam: Callable[[Segment], None] | None = None
        self.trace: Trace | None = None
        self._config, self._context, self._folder = config, context, folder
        self._backend, self._readings = backend, readings
        self.note, self._clock = note, never_backward(clock)
        self._slots = -(-config.slots // config.workers)
        self._processes: list[_Process] = []
        self._starts: list[float] = [0.0] * config.workers  # when processes that are missing may be started
        self._number, self._failed_starts = 0, 0
        self._router = Router(seed=config.seed)
        self._attempts: dict[int, _Attempt] = {}
        self._moved: set[int] = set()  # rollouts whose process was lost and that have not begun again
        self._failures: list[Failure] = []
        self._ended: list[Trajectory] = []
        self._current: _Publication | None = None  # what all processes sample with
        self._coming: _Publication | None = None
        self._next: tuple[dict, int] | None = None  # newer weights, while others are on their way
        self._closed = False

    # ---- what the loop sees

    @property
    def running(self) -> int:
        return len(self._attempts) + len(self._failures) + len(self._ended)

    @property
    def free(self) -> int:
        return self._router.free(self._clock())

    def oldest_versions(self) -> list[int]:
        return [a.oldest_version for a in self._attempts.values()]

    def start(
        self,
        split: Split,
        index: int,
        *,
        rollout: int,
        attempt: int = 0,
        snapshot: Trajectory | None = None,
        **labels,
    ) -> None:
        """Sends an attempt to a process, with which it stays: the one that should be done with it soonest, or after the
        loss of another that of the others which its number says."""
        now = self._clock()
        name = self._router.route(rollout, now, moved=rollout in self._moved)
        self._moved.discard(rollout)
        process = next(p for p in self._processes if p.name == name)
        oldest = process.version if snapshot is None else min(process.version, snapshot.oldest_version)
        self._attempts[rollout] = _Attempt(process, attempt, oldest, now)
        payload = b"" if snapshot is None else save_trajectory(snapshot)
        self._send(process, "start", payload, split=split, index=index, rollout=rollout, attempt=attempt, **labels)

    def dispatch(self) -> bool:
        """Whether anything is under way; processes need no call to go on."""
        return bool(self._attempts)

    def collect(self, *, wait: float = 0.05) -> list[Trajectory | Failure]:
        """What has ended; waits up to `wait` s for the first message. Keeps processes and publications going."""
        self._start_missing()
        self._publish_next()
        by_link = {p.link: p for p in self._processes}
        idle = not (self._failures or self._ended)
        for link in self._backend.wait(list(by_link), wait if idle else 0.0):
            self._read(by_link[link])
        now = self._clock()
        for process in list(self._processes):
            limit = self._config.worker_timeout if process.ready else START_TIMEOUT_S
            if now - process.heard_at > limit:
                self._lose(process, f"no sign of life for {limit:g} s")
        ended, self._ended, self._failures = [*self._failures, *self._ended], [], []
        return ended

    def stop(self) -> None:
        """Forgets all attempts under way."""
        for process in list(self._processes):
            self._send(process, "stop")
        for rollout in list(self._attempts):
            self._forget(rollout)
        self._failures, self._ended = [], []
        self._moved.clear()

    def publish(self, params: dict, version: int) -> None:
        """New weights, to be sampled with once every process has loaded them. They must not be donated by anyone."""
        for leaf in jax.tree.leaves(params):
            if hasattr(leaf, "copy_to_host_async"):
                leaf.copy_to_host_async()
        self._next = params, version

    def warm_up(self, check: Callable[[], None] = lambda: None) -> list[str]:
        """Waits until every process has compiled its programs."""
        while len(self._processes) < self._config.workers or not all(p.ready for p in self._processes):
            check()
            self.collect()
        return [f"{self._config.workers} processes of {self._slots} slots"]

    def watched(self, watch: Callable) -> None:
        """What other processes' devices do is measured there, see `utilization`."""

    def utilization(self) -> list[tuple[float, float]]:
        """(utilisation, the same weighted by live rows) of each process's device, as it said last."""
        known = [p.status for p in self._processes if "utilization" in p.status]
        return [(status["utilization"], status["utilization_slots"]) for status in known]

    def describe(self) -> list[dict]:
        """For a person: one entry per process."""
        now, entries = self._clock(), []
        for p in self._processes:
            worker = self._router.workers.get(p.name)
            entries.append({
                "name": p.name, "where": p.link.where, "version": p.version, "slots": self._slots, **p.status,
                "running": sum(a.process is p for a in self._attempts.values()), "heard_s": now - p.heard_at,
                "latency_s": worker.latency_s if worker else None, "failures": worker.failures if worker else 0,
            })  # fmt: skip
        return entries

    def close(self) -> None:
        """Ends all processes, by force after two seconds."""
        self._closed = True
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.link.send("end")
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            process.link.close(deadline)
        self._processes = []

    # ---- processes

    def _start_missing(self) -> None:
        if self._closed:
            return
        now = self._clock()
        (self._folder / "weights").mkdir(exist_ok=True)
        due, self._starts = [at for at in self._starts if at <= now], [at for at in self._starts if at > now]
        for _ in due:
            process = _Process(f"w{self._number}", self._backend.start(f"w{self._number}"), now)
            self._processes.append(process)
            self._send(
                process, "config", config=self._config.to_json(), slots=self._slots, device=self._number,
                readings=self._readings,
            )  # fmt: skip
            self._number += 1

    def _lose(self, process: _Process, reason: str, pause_s: float = 0.0) -> None:
        """A process is gone or of no use: its attempts fail, and another one takes its place."""
        if process not in self._processes:
            return
        self._processes.remove(process)
        process.link.kill()
        if process.name in self._router.workers:
            self._router.leave(process.name)
        lost = [rollout for rollout, a in self._attempts.items() if a.process is process]
        for rollout in lost:
            attempt = self._attempts.pop(rollout).attempt
            self._failures.append(Failure(rollout, attempt, f"worker {process.name}: {reason}"))
        self._moved.update(lost)
        self.note(f"worker {process.name} is replaced: {reason}; {len(lost)} attempts start again")
        self._failed_starts += not process.ready
        if self._failed_starts >= FAILED_STARTS * self._config.workers:
            raise FailedWorkersError(
                f"{self._failed_starts} rollout processes in a row did not start; {process.name}: {reason}"
            )
        self._starts.append(self._clock() + (pause_s if process.ready else RETRY_S))
        if self._coming is not None:
            self._coming.waiting.discard(process)
            self._coming.loaded.discard(process)
            self._commit_if_loaded()

    def _send(self, process: _Process, kind: str, payload: bytes = b"", **fields) -> None:
        try:
            process.link.send(kind, payload, **fields)
        except BlockingIOError:
            self._lose(process, "took no message")
        except OSError:
            self._lose(process, process.link.end_of())

    def _read(self, process: _Process) -> None:
        """All messages of a process that are there."""
        try:
            for message, payload in process.link.messages():
                process.heard_at = self._clock()
                self._heed(process, message, payload)
                if process not in self._processes:
                    return  # it is of no use, whatever else it has sent
        except (EOFError, OSError):
            self._lose(process, process.link.end_of())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._lose(process, f"sent garbage: {error}"[:300])

    def _heed(self, process: _Process, message: dict, payload: bytes) -> None:
        kind = message["kind"]
        if kind == "ended":
            self._take(process, payload)
        elif kind == "failed":
            rollout, attempt = message["rollout"], message["attempt"]
            if self._is_mine(process, rollout, attempt):
                self._forget(rollout)
                self._failures.append(Failure(rollout, attempt, message["reason"]))
        elif kind == "segment":
            segment = self._checked(load_segment(payload))
            if self.seam is not None and self._is_mine(process, segment.rollout, segment.attempt):
                self.seam(segment)
        elif kind == "ready":
            self._welcome(process)
        elif kind in ("prepared", "refused"):
            self._answered(process, message["version"], message.get("reason"))
        elif kind == "committed":
            process.version = message["version"]
            if process.name not in self._router.workers:
                self._router.join(process.name, slots=self._slots)
                self._observe(process, process.status)
        elif kind == "status":
            self._observe(process, {name: float(value) for name, value in message.items() if name != "kind"})
        else:
            raise ValueError(f"unknown message {kind!r}")

    def _observe(self, process: _Process, status: dict[str, float]) -> None:
        """Device readings move the weights of the router before a device slows itself down."""
        process.status = status
        if "temperature_c" in status and process.name in self._router.workers:
            self._router.observe(process.name, Reading(status["temperature_c"], status["free_memory"]))

    # ---- attempts

    def _is_mine(self, process: _Process, rollout: int, attempt: int) -> bool:
        """Whether this process runs that attempt; what a process sends of one that was stopped is ignored."""
        a = self._attempts.get(rollout)
        return a is not None and a.process is process and a.attempt == attempt

    def _take(self, process: _Process, payload: bytes) -> None:
        t = load_trajectory(payload)
        if not self._is_mine(process, t.rollout, t.attempt):
            return
        started_at = self._attempts[t.rollout].started_at
        try:
            self._checked(t)
        except ValueError as error:
            del self._attempts[t.rollout]
            self._router.failed(process.name, self._clock())
            self._failures.append(Failure(t.rollout, t.attempt, f"worker {process.name} returned garbage: {error}"))
            return
        del self._attempts[t.rollout]
        self._router.ended(process.name, self._clock() - started_at, self._clock())
        if self.trace is not None:
            self.trace.add(t.task, f"worker {process.name}", started_at, self._clock(), rollout=t.rollout)
        self._ended.append(t)

    def _checked(self, t: Trajectory | Segment) -> Trajectory | Segment:
        """Raises ValueError for what no sound process returns; a log-prob that is no number never reaches a ratio."""
        length = t.end_token if isinstance(t, Segment) else t.length
        if length > self._context:
            raise ValueError(f"{length} tokens in a context of {self._context}")
        if not np.all(np.isfinite(t.rollout_logp)):
            raise ValueError("a log-prob is not finite")
        check_content(t)
        if np.any(t.tokens >= self.family.tokenizer.vocab_size):
            raise ValueError(f"token {t.tokens.max()} of a vocabulary of {self.family.tokenizer.vocab_size}")
        newest = int(t.version.max())
        if newest > self.version:
            raise ValueError(f"tokens of version {newest}, and the newest published one is {self.version}")
        return t

    def _forget(self, rollout: int) -> None:
        a = self._attempts.pop(rollout)
        self._router.release(a.process.name)

    # ---- weights

    def _publish_next(self) -> None:
        """Writes and announces the newest weights once they are computed and nothing else is on its way."""
        if self._coming is None and self._next is not None:
            params, version = self._next
            self._next = None
            self._coming = _Publication(version, params, self._folder / "weights" / f"{version}.safetensors")
        p = self._coming
        if p is None or p.crc32 is not None or self._clock() < p.not_before:
            return
        if not all(leaf.is_ready() for leaf in jax.tree.leaves(p.params) if hasattr(leaf, "is_ready")):
            return
        try:
            p.crc32 = save_weights(p.path, p.params)
        except OSError as error:
            self._retry(f"cannot be written: {error.strerror or error}")
            return
        p.waiting = {process for process in self._processes if process.ready}
        for process in list(p.waiting):
            self._announce(process, p)
        self._commit_if_loaded()

    def _announce(self, process: _Process, p: _Publication) -> None:
        try:
            process.link.announce(p.version, p.path, p.crc32)
        except OSError:
            self._lose(process, process.link.end_of())

    def _welcome(self, process: _Process) -> None:
        """Weights for a process that has just become ready: those on their way if there are any, else those in use."""
        process.ready, self._failed_starts = True, 0
        coming, current = self._coming, self._current
        if coming is not None and coming.crc32 is not None:
            coming.waiting.add(process)
            self._announce(process, coming)
        elif current is not None:
            try:
                current.crc32 = save_weights(current.path, current.params)  # the file may have been damaged since
            except OSError as error:
                self._lose(process, f"its weights cannot be written: {error.strerror or error}", RETRY_S)
            else:
                self._announce(process, current)

    def _answered(self, process: _Process, version: int, refusal: str | None) -> None:
        coming, current = self._coming, self._current
        if coming is not None and coming.crc32 is not None and version == coming.version:
            if refusal is not None:
                self._retry(f"{process.name} refused it: {refusal}")
                return
            coming.waiting.discard(process)
            coming.loaded.add(process)
            self._commit_if_loaded()
        elif current is not None and version == current.version:
            if refusal is not None:
                self._lose(process, f"refused the weights in use: {refusal}", RETRY_S)
            elif process.told != version:  # a second answer, where weights were announced twice, is none
                self._commit(process, version)

    def _commit_if_loaded(self) -> None:
        """The second phase, once every process has loaded the weights on their way."""
        p = self._coming
        if p is None or p.crc32 is None or p.waiting:
            return
        previous, self._current, self._coming, self.version = self._current, p, None, p.version
        for process in list(p.loaded):
            self._commit(process, p.version)
        if previous is not None and previous.path != p.path:
            previous.path.unlink(missing_ok=True)

    def _commit(self, process: _Process, version: int) -> None:
        process.told = version
        self._send(process, "commit", version=version)

    def _retry(self, reason: str) -> None:
        """A failed publication leaves everyone on the old version and is tried again."""
        p = self._coming
        self.note(f"publication of version {p.version} failed, to be tried again: {reason}")
        p.crc32, p.waiting, p.loaded, p.not_before = None, set(), set(), self._clock() + RETRY_S
