"""Attempts on rollout processes of this machine: what `Agents` is to one engine, for several of them.

Each process has an engine and environments of its own (`runtime.worker`). A process that dies, stops answering or sends
garbage is replaced; its attempts fail, and the loop starts them again from their last stored segment. Weights are
published in two phases: every process loads and checks them, and only when all have does any sample with them.
"""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection as channels

import jax
import numpy as np

from sao_jax.data.protocols import Split, TaskFamily
from sao_jax.data.trajectory import Trajectory, load_trajectory, save_trajectory
from sao_jax.rollout.agents import Failure
from sao_jax.rollout.clock import never_backward
from sao_jax.runtime import wire
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.router import Router
from sao_jax.runtime.trace import Trace
from sao_jax.runtime.weights import save_weights

COMMAND = (sys.executable, "-m", "sao_jax.runtime.worker")
RETRY_S = 1.0  # before a publication or the start of a process is tried again
START_TIMEOUT_S = 600.0  # a process that compiles says nothing meanwhile


@dataclasses.dataclass(eq=False)
class _Process:
    """One rollout process. `version`: of the weights it samples with; None until it has any."""

    name: str
    popen: subprocess.Popen
    connection: channels.Connection
    heard_at: float
    ready: bool = False
    version: int | None = None


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
      seam: called with a snapshot of an attempt under way at the end of each segment.
    """

    last_schedule = None  # bursts of several engines have no common order to be driven again in

    def __init__(
        self,
        config: RunConfig,
        family: TaskFamily,
        context: int,
        folder: pathlib.Path,
        *,
        arguments: Sequence[str] = (),
        note: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.family, self.version = family, 0
        self.seam: Callable[[Trajectory], None] | None = None
        self.trace: Trace | None = None
        self._config, self._context, self._folder = config, context, folder
        self.note, self._clock, self._arguments = note, never_backward(clock), arguments
        self._slots = -(-config.slots // config.workers)
        self._processes: list[_Process] = []
        self._starts: list[float] = [0.0] * config.workers  # when processes that are missing may be started
        self._number = 0
        self._router = Router(seed=config.seed)
        self._attempts: dict[int, _Attempt] = {}
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
        """Sends an attempt to the process that should be done with it soonest."""
        now = self._clock()
        name = self._router.route(rollout, now)
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
        by_connection = {p.connection: p for p in self._processes}
        idle = not (self._failures or self._ended)
        for ready in channels.wait(list(by_connection), wait if idle else 0.0):
            self._read(by_connection[ready])
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
        """What other processes' devices do is measured there."""

    def describe(self) -> list[dict]:
        """For a person: one entry per process."""
        now, entries = self._clock(), []
        for p in self._processes:
            worker = self._router.workers.get(p.name)
            entries.append({
                "name": p.name, "pid": p.popen.pid, "version": p.version, "slots": self._slots,
                "running": sum(a.process is p for a in self._attempts.values()), "heard_s": now - p.heard_at,
                "latency_s": worker.latency_s if worker else None, "failures": worker.failures if worker else 0,
            })  # fmt: skip
        return entries

    def close(self) -> None:
        """Ends all processes, by force after two seconds."""
        self._closed = True
        for process in self._processes:
            with contextlib.suppress(OSError):
                wire.send(process.connection, "end")
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
            process.connection.close()
        self._processes = []

    # ---- processes

    def _start_missing(self) -> None:
        now = self._clock()
        for name in ("weights", "workers"):
            (self._folder / name).mkdir(exist_ok=True)
        while self._starts and self._starts[0] <= now and not self._closed:
            self._starts.pop(0)
            name = f"w{self._number}"
            self._number += 1
            ours, theirs = wire.pair()
            with (self._folder / "workers" / f"{name}.log").open("wb") as log:
                popen = subprocess.Popen(
                    [*COMMAND, str(theirs.fileno()), *self._arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C in the terminal is for the run, which tells its processes
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                )
            theirs.close()
            process = _Process(name, popen, ours, now)
            self._processes.append(process)
            self._send(process, "config", config=self._config.to_json(), slots=self._slots)

    def _lose(self, process: _Process, reason: str, pause_s: float = 0.0) -> None:
        """A process is gone or of no use: its attempts fail, and another one takes its place."""
        if process not in self._processes:
            return
        self._processes.remove(process)
        process.popen.kill()
        process.popen.wait()
        process.connection.close()
        if process.name in self._router.workers:
            self._router.leave(process.name)
        lost = [rollout for rollout, a in self._attempts.items() if a.process is process]
        for rollout in lost:
            attempt = self._attempts.pop(rollout).attempt
            self._failures.append(Failure(rollout, attempt, f"worker {process.name}: {reason}"))
        self.note(f"worker {process.name} is replaced: {reason}; {len(lost)} attempts start again")
        self._starts.append(self._clock() + (pause_s if process.ready else RETRY_S))
        if self._coming is not None:
            self._coming.waiting.discard(process)
            self._coming.loaded.discard(process)
            self._commit_if_loaded()

    def _send(self, process: _Process, kind: str, payload: bytes = b"", **fields) -> None:
        try:
            wire.send(process.connection, kind, payload, **fields)
        except OSError:
            self._lose(process, _end_of(process))

    def _read(self, process: _Process) -> None:
        """All messages of a process that are there."""
        try:
            while process in self._processes and process.connection.poll(0):
                message, payload = wire.receive(process.connection)
                process.heard_at = self._clock()
                self._heed(process, message, payload)
        except (EOFError, OSError):
            self._lose(process, _end_of(process))
        except (ValueError, KeyError, TypeError) as error:
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
            snapshot = self._checked(load_trajectory(payload))
            if self.seam is not None and self._is_mine(process, snapshot.rollout, snapshot.attempt):
                self.seam(snapshot)
        elif kind == "ready":
            self._welcome(process)
        elif kind in ("prepared", "refused"):
            self._answered(process, message["version"], message.get("reason"))
        elif kind == "committed":
            process.version = message["version"]
            if process.name not in self._router.workers:
                self._router.join(process.name, slots=self._slots)
        elif kind != "status":
            raise ValueError(f"unknown message {kind!r}")

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

    def _checked(self, t: Trajectory) -> Trajectory:
        """Raises ValueError for what no sound process returns; a log-prob that is no number never reaches a ratio."""
        if t.length > self._context:
            raise ValueError(f"{t.length} tokens in a context of {self._context}")
        if not np.all(np.isfinite(t.rollout_logp)):
            raise ValueError("a log-prob is not finite")
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
        self._send(process, "prepare", version=p.version, path=str(p.path), crc32=p.crc32)

    def _welcome(self, process: _Process) -> None:
        """Weights for a process that has just become ready: those on their way if there are any, else those in use."""
        process.ready = True
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
            else:
                self._send(process, "commit", version=version)

    def _commit_if_loaded(self) -> None:
        """The second phase, once every process has loaded the weights on their way."""
        p = self._coming
        if p is None or p.crc32 is None or p.waiting:
            return
        previous, self._current, self._coming, self.version = self._current, p, None, p.version
        for process in list(p.loaded):
            self._send(process, "commit", version=p.version)
        if previous is not None and previous.path != p.path:
            previous.path.unlink(missing_ok=True)

    def _retry(self, reason: str) -> None:
        """A failed publication leaves everyone on the old version and is tried again."""
        p = self._coming
        self.note(f"publication of version {p.version} failed, to be tried again: {reason}")
        p.crc32, p.waiting, p.loaded, p.not_before = None, set(), set(), self._clock() + RETRY_S


def _end_of(process: _Process) -> str:
    code = process.popen.poll()
    if code is None:
        try:
            code = process.popen.wait(0.5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
